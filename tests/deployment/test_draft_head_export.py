"""Draft heads exported in published layouts, and read from them as heads."""

import json

import pytest
import torch
from safetensors.torch import load_file

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.inspect import inspect
from attar.checkpoint.open import open_checkpoint
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.models.draft_heads.content import head_target
from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.models.draft_heads.folder import DRAFT_HEADS, load_draft_head, save_draft_head
from attar.models.draft_heads.kind import is_draft_head
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.heads.load import trained_for
from tests import tiny_models
from tests.runtime.speculate.proposing import Eager

SIZES = {"depth": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 48, "rope_theta": 500.0}
SHAPE, LLAMA = DraftLayerShape(**SIZES), DraftLayerShape(**SIZES, head_norms=False)
KINDS = {  # what a config has besides hidden, vocabulary and drafts; the layouts
    "medusa": ({"layers": (3,), "residual_layers": 2}, ("medusa",)),
    "eagle": ({"layers": (3,), "shape": LLAMA}, ("eagle",)),
    "eagle3": ({"layers": (0, 1, 2), "shape": LLAMA, "draft_vocabulary": 50}, ("eagle", "speculators")),
    "dflash": ({"layers": (0, 2), "shape": SHAPE}, ("deepspec", "speculators")),
    "dspark": (
        {"layers": (0, 2), "shape": SHAPE, "markov_rank": 8, "confidence": True, "draft_vocabulary": 50},
        ("deepspec", "speculators"),
    ),
}
CASES = [(kind, layout) for kind, (_, layouts) in KINDS.items() for layout in layouts]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """A folder of each kind, with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    for kind, (more, _) in KINDS.items():
        config, module = DRAFT_HEADS[kind]
        head = module(config(hidden=64, vocabulary=320, drafts=3, **more))
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
            if "draft_vocabulary" in more:
                head.d2t.copy_(torch.randperm(320)[:50].sort().values - torch.arange(50))
        (folder / kind).mkdir()
        save_draft_head(head, folder / kind, target=str(target))
    return folder


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_an_exported_head_is_read_as_the_head_that_it_was(heads, target, tmp_path, kind, layout):
    exported = export(heads / kind, tmp_path / "out", ExportSettings(format=layout))
    assert is_draft_head(exported) and not (heads / kind / "attar.json").exists()
    wanted = load_draft_head(open_checkpoint(heads / kind))
    got = load_draft_head(open_checkpoint(tmp_path / "out"), head_target(open_checkpoint(target)))
    assert got.config == wanted.config
    states = got.state_dict()
    assert states.keys() == wanted.state_dict().keys()
    assert all(torch.equal(x, states[name]) for name, x in wanted.state_dict().items())
    assert "read back equal" in exported.card.details["checks"][0]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_from_a_published_folder(heads, target, tmp_path, kind):
    export(heads / kind, tmp_path / "out", ExportSettings(format=KINDS[kind][1][-1]))
    model = LLM(target, draft=tmp_path / "out", kv_tokens=512)
    model.engine.speculator.policy = Eager()
    result = model.generate([[5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert len(result.token_ids) == 40 and result.usage.drafted_tokens


def test_from_one_published_layout_to_another(heads, target, tmp_path):
    export(heads / "dspark", tmp_path / "one", ExportSettings(format="speculators"))
    export(tmp_path / "one", tmp_path / "two", ExportSettings(format="deepspec", target=str(target)))
    export(heads / "dspark", tmp_path / "same", ExportSettings(format="deepspec"))
    two, same = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "same"))
    assert two.keys() == same.keys() and all(torch.equal(x, same[name]) for name, x in two.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("two", "same")]
    assert configs[0] == configs[1]


def test_the_target_may_be_named(heads, target, tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    save_draft_head(load_draft_head(open_checkpoint(heads / "dspark")), folder, target="nowhere/to-be-found")
    with pytest.raises(ModelError, match="embedding") as raised:
        export(folder, tmp_path / "out", ExportSettings(format="speculators"))
    assert "--target MODEL" in raised.value.hint
    export(folder, tmp_path / "out", ExportSettings(format="speculators", target=str(target)))
    verifier = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "model", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_inspect_describes_a_published_head(heads, tmp_path, kind, layout):
    export(heads / kind, tmp_path / "out", ExportSettings(format=layout))
    before, after = (inspect(folder).draft_head for folder in (heads / kind, tmp_path / "out"))
    assert {key: x for key, x in after.items() if key not in ("layers", "target")} == {
        key: x for key, x in before.items() if key not in ("layers", "target")
    }
    text = inspect(tmp_path / "out").render()
    assert f"{kind}, 3 drafts, for model" in text
    assert f"--draft {open_checkpoint(tmp_path / 'out').name}" in (tmp_path / "out" / "README.md").read_text()


def test_an_exported_head_still_knows_its_model(heads, target, tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    save_draft_head(load_draft_head(open_checkpoint(heads / "eagle")), folder, target=str(target))
    parent = Parent(
        role="weights", name="model", stage="original", fingerprint=open_checkpoint(target).fingerprint()
    )
    Card(name="head", stage="distill", parents=(parent,)).write(folder)
    exported = export(folder, tmp_path / "out", ExportSettings(format="eagle"))
    assert trained_for(exported, open_checkpoint(target))
    assert not trained_for(exported, open_checkpoint("attar:tiny"))


def test_what_is_not_exported_is_refused_before_any_work(heads, target, tmp_path):
    refused = [
        (target, "speculators", "is no draft head"),
        (heads / "medusa", "speculators", "kind medusa: format speculators has dflash, dspark, eagle3"),
        (heads / "eagle3", "dense", "is a draft head"),
        (heads / "eagle3", "gguf", "is a draft head"),
    ]
    for source, layout, error in refused:
        with pytest.raises(ModelError, match=error):
            export(source, tmp_path / "out", ExportSettings(format=layout))
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingsError, match="draft heads'"):
        ExportSettings(format="dense", target="x")


def test_a_half_folder_is_refused_in_one_line(heads, target, tmp_path):
    export(heads / "dspark", tmp_path / "out", ExportSettings(format="speculators"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["transformer_layer_config"]["num_hidden_layers"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"out.*num_hidden_layers is None") as raised:
        load_draft_head(open_checkpoint(tmp_path / "out"), head_target(open_checkpoint(target)))
    assert "\n" not in raised.value.message
