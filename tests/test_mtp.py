"""What each verb makes of a multi-token prediction head: kept with the model, named where it stays dense, cut
with the model, or left out with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.cli.main import call
from attar.deployment import gguf
from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.metadata import metadata as described
from attar.formats.readers import Decoded
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model
from attar.pruning.experts import prune as experts
from attar.quantization.grids import IntGrid
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import plan
from attar.quantization.settings import StorageSettings
from attar.verbs import distill, export, prune, quantize, recover
from tests import tiny_models, tiny_mtp

DATA = str(Path(json.__file__).parent)
TEXT: dict[str, Any] = {"data": DATA, "samples": 2, "sequence_length": 32}
PLAIN: dict[str, Any] = {"method": "rtn", "check_tokens": 0}
W4 = {**PLAIN, "scheme": "W4A16", "group_size": 32}
TRAIN: dict[str, Any] = {"data": DATA, "sequence_length": 32, "steps": 1, "batch_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A tiny model of each form, with its head."""
    home = tmp_path_factory.mktemp("models")
    return {family: tiny_mtp.save(family, home / family) for family in tiny_mtp.HEADS}


def same_head(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two checkpoints have one head, bit for bit."""
    return first.mtp.keys() == second.mtp.keys() and all(
        torch.equal(first.load(name), second.load(name)) for name in first.mtp
    )


@pytest.mark.parametrize("family", tiny_mtp.HEADS)
def test_quantize_rounds_the_blocks_and_names_the_rest(family, models, tmp_path):
    source = open_checkpoint(models[family])
    written = quantize(source, tmp_path / "out", **W4)
    decoded = Decoded(written.with_mtp)
    named = written.config["quantization_config"]["ignore"]
    coded = 0
    for name, info in source.mtp.items():
        weight = source.load(name)
        if decoded.is_coded(name):
            wanted = rtn(weight, IntGrid(4, 32, storage=torch.float32)).dequantize()
            assert torch.equal(decoded.load(name), wanted)
            coded += 1
        else:
            assert torch.equal(decoded.load(name), weight)
            embedding = name.endswith("embed_tokens.weight")
            assert len(info.shape) != 2 or embedding or name.removesuffix(".weight") in named
    assert coded >= 7
    joint = next(name for name in source.mtp if info_of(source, name) == (64, 128))
    assert joint.removesuffix(".weight") in named and not decoded.is_coded(joint)


def info_of(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """The shape of a head's tensor."""
    return tuple(checkpoint.mtp[name].shape)


def test_engines_find_their_own_names(models):
    """MiMo's and Ernie's layers have another number in vLLM, fused modules one name, SGLang's decoder too."""
    static = StorageSettings(scheme="FP8")  # nothing is known of the head's inputs
    ignore = {
        family: plan(open_checkpoint(models[family]), static).ignore for family in ("qwen2", "deepseek_v3")
    }
    assert {"model.mtp_layers.0.self_attn.q_proj", "model.layers.3.self_attn.qkv_proj"} < {*ignore["qwen2"]}
    deepseek = {*ignore["deepseek_v3"]}
    assert {"model.layers.3.self_attn.fused_qkv_a_proj", "model.decoder.mlp.experts.0.up_proj"} < deepseek
    assert not any(name.startswith("model.layers.2.mlp.experts") for name in deepseek)


def test_what_engines_fuse_shares_the_global_scale_of_nvfp4(models, tmp_path):
    rounded = quantize(models["qwen2"], tmp_path / "out", scheme="NVFP4A16", **PLAIN)
    block = tiny_mtp.block_name("qwen2", 3)
    for names in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        scales = [float(rounded.load(f"{block}.{name}.weight_global_scale")) for name in names]
        assert len(set(scales)) == 1
        largest = max(
            float(open_checkpoint(models["qwen2"]).load(f"{block}.{name}.weight").abs().max())
            for name in names
        )
        assert scales[0] == pytest.approx(448 * 6 / largest, rel=1e-6)


def test_a_stack_of_experts_is_named_expert_by_expert():
    from attar.formats.dense_names import dense_names

    stacks = {"mtp.layers.0.mlp.experts.down_proj": torch.empty(2, 4, 4)}
    assert dense_names(stacks, (), {"num_hidden_layers": 1}) == [
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.0.down_proj",
        "mtp.layers.0.mlp.experts.1.down_proj",
    ]


def test_ignore_holds_for_the_head_too(models):
    assert not plan(open_checkpoint(models["qwen2"]), StorageSettings(group_size=32, ignore=["re:mtp"])).mtp


def test_rotation_leaves_it_out(models, tmp_path, capsys):
    written = quantize(models["qwen2"], tmp_path / "out", rotate=True, untie=True, **W4)
    assert not written.mtp and written.config["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("format", ["gptq", "dense"])
def test_export_decodes_it_and_names_it(format, models, tmp_path):
    quantize(models["qwen3_next"], tmp_path / "coded", **W4)
    source = Decoded(open_checkpoint(tmp_path / "coded").with_mtp)
    written = export(tmp_path / "coded", tmp_path / "out", format=format)
    assert written.mtp.keys() == open_checkpoint(models["qwen3_next"]).mtp.keys()
    kind = torch.float16 if format == "gptq" else torch.float32
    assert all(torch.equal(written.load(name), source.load(name).to(kind)) for name in written.mtp)
    skipped = written.config.get("quantization_config", {}).get("dynamic", {})
    assert (r"-:^mtp\.fc$" in skipped) == (format == "gptq")


def test_export_of_modelopt_keeps_the_codes(models, tmp_path):
    quantize(models["glm4_moe"], tmp_path / "coded", **PLAIN, scheme="FP8_DYNAMIC")
    source, written = (
        Decoded(checkpoint.with_mtp)
        for checkpoint in (
            open_checkpoint(tmp_path / "coded"),
            export(tmp_path / "coded", tmp_path / "out", format="modelopt"),
        )
    )
    name = "model.layers.3.self_attn.o_proj.weight"
    assert written.is_coded(name) and torch.equal(written.load(name), source.load(name))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen2"])
def test_pruned_layers_keep_it(family, models, tmp_path):
    source = open_checkpoint(models[family])
    written = prune(source, tmp_path / "out", method="layers", ratio=0.34, reconstruct="none", **TEXT)
    assert written.config["num_hidden_layers"] == 2
    numbered = {name.replace("layers.3.", "layers.2."): name for name in source.mtp}
    assert sorted(written.mtp) == sorted(numbered)
    assert all(torch.equal(written.load(name), source.load(old)) for name, old in numbered.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.nbytes


def test_pruned_neurons_leave_it_out(models, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--ratio", "0.5", "--reconstruct", "none", "--data", DATA, "--samples", "2"]
    assert call(["prune", str(models["qwen2"]), "-o", str(out), "--method", "neurons", *options]) == 0
    assert "prediction head is left out: the model has other widths now" in capsys.readouterr().err
    assert not open_checkpoint(out).mtp and open_checkpoint(out).config["num_nextn_predict_layers"] == 0


def test_zeros_keep_it(models, tmp_path):
    written = prune(models["qwen2"], tmp_path / "out", method="magnitude", sparsity=0.5)
    assert same_head(open_checkpoint(models["qwen2"]), written)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_its_experts_are_chosen_by_what_it_does(family, models, tmp_path):
    source = open_checkpoint(models[family])
    written = prune(source, tmp_path / "out", method="experts", experts=3, criterion="frequency", **TEXT)
    layers = written.card.details["layers"]
    chosen = [members[0] for members in layers[-1]["experts"]]
    assert layers[-1]["name"].startswith("head.") and layers[-1]["frequency_removed"] < 5 / 8
    block = tiny_mtp.block_name(family, 3)
    router = f"{block}.mlp.gate.weight"
    assert torch.equal(written.load(router), source.load(router)[chosen])
    for number, expert in enumerate(chosen):
        names = (f"{block}.mlp.experts.{one}.up_proj.weight" for one in (number, expert))
        assert torch.equal(written.load(next(names)), source.load(next(names)))
    assert f"{block}.mlp.experts.3.up_proj.weight" not in written.mtp


def test_experts_of_an_unknown_head_are_those_that_the_last_layer_keeps(models, tmp_path, monkeypatch):
    def refuse(source):
        raise ModelError("of a form unknown here")

    monkeypatch.setattr(experts, "load_mtp_head", refuse)
    source = open_checkpoint(models["glm4_moe"])
    written = prune(source, tmp_path / "out", method="experts", experts=3, criterion="cluster", **TEXT)
    kept = [members[0] for members in written.card.details["layers"][-1]["experts"]]
    router = "model.layers.3.mlp.gate.weight"
    assert torch.equal(written.load(router), source.load(router)[kept])


def test_recovered_and_distilled_models_keep_it(models, tmp_path):
    source = open_checkpoint(models["qwen2"])
    recovered = recover(source, tmp_path / "recovered", alpha=0.0, **TRAIN)
    student = distill(source, tmp_path / "student", keep_layers=0.67, **TRAIN)
    assert same_head(source, recovered) and same_head(source, student)
    assert student.config["num_hidden_layers"] == 2


def test_a_narrower_student_has_none(models, tmp_path):
    student = distill(models["qwen2"], tmp_path / "student", width=32, **TRAIN)
    assert not student.mtp and student.config["num_nextn_predict_layers"] == 0


def test_a_merge_keeps_that_of_its_first_model(models, tmp_path, capsys):
    other = tiny_models.save(tiny_models.build("qwen2", seed=1), tmp_path / "other")
    recipe = tmp_path / "merge.yml"
    parents = [{"model": str(folder)} for folder in (models["qwen2"], other)]
    recipe.write_text(json.dumps({"merge_method": "linear", "models": parents, "parameters": {"weight": 1}}))
    assert call(["merge", str(recipe), "-o", str(tmp_path / "out"), "--tokens", "0"]) == 0
    assert f"prediction head is that of {models['qwen2']}, unmerged" in capsys.readouterr().err
    assert same_head(open_checkpoint(models["qwen2"]), open_checkpoint(tmp_path / "out"))


def test_gguf_leaves_deepseeks_out_and_says_so(models, tmp_path, capsys):
    file, options = tmp_path / "out.gguf", ["--format", "gguf", "--type", "F16"]
    assert call(["export", str(models["deepseek_v3"]), "-o", str(file), *options]) == 0
    assert "prediction head is left out: attar writes none to gguf" in capsys.readouterr().err
    assert open_checkpoint(file).config["num_hidden_layers"] == 3


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_gguf_file_has_the_head_and_gives_it_back(family, models, tmp_path):
    source = open_checkpoint(models[family])
    file = export(models[family], tmp_path / "x.gguf", format="gguf", type="F32")
    again = Decoded(admit(file))
    assert again.config["num_hidden_layers"] == 3 and not file.notes
    assert again.mtp.keys() == source.mtp.keys()
    for name in source.mtp:
        torch.testing.assert_close(again.load(name), source.load(name), rtol=1e-6, atol=1e-7)
    dense = export(file, tmp_path / "dense", format="dense")
    assert dense.mtp.keys() == source.mtp.keys()
    coded = export(dense, tmp_path / "y.gguf", format="gguf", type="Q8_0", effort="fast", imatrix="none")
    assert {info.block for name, info in coded.mtp.items() if ".attn_q.weight" in name} == {"Q8_0"}


def test_a_gguf_file_with_a_head_is_the_source_of_pruning(models, tmp_path):
    file = export(models["glm4_moe"], tmp_path / "x.gguf", format="gguf", type="F32")
    cut = prune(file, tmp_path / "out", method="experts", experts=4, **TEXT)
    assert cut.config["n_routed_experts"] == 4
    assert {name.split(".")[5] for name in cut.mtp if ".experts." in name} == set("0123")


def test_a_gguf_file_with_a_part_of_a_block_is_refused(models, tmp_path, monkeypatch):
    placements = gguf.placements
    missing = "blk.3.attn_q.weight"
    monkeypatch.setattr(
        gguf, "placements", lambda *given: [item for item in placements(*given) if item.gguf != missing]
    )
    file = tmp_path / "x.gguf"
    with pytest.raises(CheckpointError, match=rf"there is no tensor '{missing}'"):
        admit(export(models["glm4_moe"], file, format="gguf", type="F32"))
        Decoded(open_checkpoint(file))


def test_a_gguf_file_with_nextn_blocks_of_deepseek_is_read_without_them(tmp_path, monkeypatch):
    folder = tiny_models.save(tiny_models.build("deepseek_v3", num_hidden_layers=4), tmp_path / "model")
    nextn = {"deepseek2.nextn_predict_layers": 1}
    monkeypatch.setattr(gguf, "described", lambda *given: {**described(*given), **nextn})
    opened = admit(export(folder, tmp_path / "x.gguf", format="gguf", type="F16"))
    assert opened.config["num_hidden_layers"] == 3
    assert len(opened.notes) == 1 and opened.notes[0].startswith("blk.3.")
    assert not any(name.startswith("model.layers.3.") for name in Decoded(opened).tensors)


def test_a_model_with_its_head_computes_what_it_does_without(models, tmp_path):
    bare = tiny_models.build("deepseek_v3")
    rows = tiny_models.tokens(bare, batch=1, length=12)
    with torch.no_grad():
        assert torch.equal(load_model(models["deepseek_v3"])(rows).logits, bare(rows).logits)
