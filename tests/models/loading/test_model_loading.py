"""Loading and saving: every family comes back as it was, and what is wrong is said in one line."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from attar.checkpoint.open import open_checkpoint
from attar.errors import AttarError, CheckpointError, ModelError, NumericsError, SettingsError
from attar.models.loading.configs import quiet
from attar.models.loading.empty import empty_model
from attar.models.loading.load import load_model, load_tokenizer, read_tokenizer, save_model
from tests import tiny_models


@pytest.fixture(scope="module")
def original():
    return tiny_models.build("llama3")


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory):
    return tiny_models.save(original, tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that the test may break."""
    return shutil.copytree(saved, tmp_path / "llama")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def message_of(call, *arguments, kind=AttarError):
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.few(4)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_comes_back(family, tmp_path):
    model = tiny_models.build(family)
    folder = tiny_models.save(model, tmp_path)
    loaded = load_model(folder)
    assert type(loaded) is type(model) and not loaded.training
    rows = tiny_models.tokens(model)
    assert torch.equal(tiny_models.logits(loaded, rows), tiny_models.logits(model, rows))
    assert load_tokenizer(folder)("def f():")["input_ids"] == tiny_models.tokenizer()("def f():")["input_ids"]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_empty_models_lack_nothing_but_weights(family, tmp_path):
    """With the weights put in, the empty model computes what the loaded one does: its buffers are right."""
    model = tiny_models.build(family)
    config = json.loads((tiny_models.save(model, tmp_path) / "config.json").read_text())
    empty = empty_model(config)
    assert type(empty) is type(model) and all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers())
    empty.load_state_dict(model.state_dict(), assign=True)
    rows = tiny_models.tokens(model)
    assert torch.equal(tiny_models.logits(empty, rows), tiny_models.logits(model, rows))


def test_empty_models_take_no_memory():
    """Neither the embedding (300 GB) nor a layer is ever made."""
    empty = empty_model(tiny_models.config("llama3", vocab_size=10_000_000, hidden_size=8192, head_dim=1024))
    assert empty.model.embed_tokens.weight.shape == (10_000_000, 8192)


def test_dtypes(saved, tmp_path, original):
    assert load_model(saved).dtype == torch.float32
    assert load_model(saved, dtype=torch.bfloat16).dtype == torch.bfloat16
    save_model(original, tmp_path / "half", torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/model.safetensors").values()} == {
        torch.bfloat16
    }
    assert load_model(tmp_path / "half").dtype == torch.bfloat16
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert original.dtype == torch.float32


def test_saving_changes_nothing_and_is_deterministic(tmp_path):
    model = tiny_models.build("smollm", seed=3)
    before = model.config.to_dict()
    for name in ("a", "b"):
        save_model(model, tmp_path / name, torch.float16)
    assert model.config.to_dict() == before
    for file in sorted(path.name for path in (tmp_path / "a").iterdir()):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_tied_weights_are_written_once(tmp_path):
    model = tiny_models.build("gpt2")
    for dtype in (None, torch.bfloat16):
        save_model(model, tmp_path / str(dtype), dtype)
        names = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert "lm_head.weight" not in names and "transformer.wte.weight" in names
        loaded = load_model(tmp_path / str(dtype))
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    """As safetensors says it on a full tmpfs."""
    model = tiny_models.build("llama3")
    before = model.config.to_dict()

    def full(*_, **__):
        model.config.dtype = "changed"
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_model(model, tmp_path, torch.bfloat16)
    assert caught.value.errno == errno.ENOSPC and model.config.to_dict() == before


def test_an_open_checkpoint_and_a_string_will_do(saved):
    assert type(load_model(open_checkpoint(saved))) is type(load_model(str(saved)))


def test_quiet(saved, capfd):
    load_model(saved)
    load_tokenizer(saved)
    empty_model(json.loads((saved / "config.json").read_text()))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    with pytest.raises(RuntimeError, match="inside"), quiet():
        raise RuntimeError("inside")
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before


def test_quantized_checkpoints_come_back_dense(folder, monkeypatch, original):
    edit_config(
        folder, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}
    )
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(1)}))
    dense = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    monkeypatch.setattr("attar.models.loading.load.stacked_state", lambda checkpoint: dict(dense))
    loaded = load_model(folder, dtype=torch.float32)
    rows = tiny_models.tokens(original)
    assert torch.equal(tiny_models.logits(loaded, rows), tiny_models.logits(original, rows))
    assert getattr(loaded.config, "quantization_config", None) is None
    del dense["model.norm.weight"]
    assert "tensor model.norm.weight is missing" in message_of(load_model, folder, kind=ModelError)


def test_foreign_quantization(folder):
    edit_config(folder, quantization_config={"quant_method": "quip"})
    assert "quantized with 'quip'" in message_of(load_model, folder, kind=ModelError)


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_devices_that_are_not_there(saved, device):
    with pytest.raises(SettingsError, match="device is"):
        load_model(saved, device=device)


def test_missing_tensor(folder):
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in message_of(
        load_model, folder, kind=ModelError
    )


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "model.norm.bias"]
)
def test_unexpected_tensor(folder, name):
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert f"tensor {name} has no place" in message_of(load_model, folder, kind=ModelError)


def test_another_tasks_head_may_lie_about(tmp_path):
    """As in bert-base-uncased, whose class leaves out the pooler and the next-sentence head."""
    folder = tiny_models.save(tiny_models.build("bert"), tmp_path)
    spare = {"bert.pooler.dense.weight": torch.ones(64, 64), "cls.seq_relationship.bias": torch.ones(2)}
    edit_weights(folder, lambda tensors: tensors.update(spare))
    assert type(load_model(folder)).__name__ == "BertForMaskedLM"


def test_wrong_shape(folder):
    edit_config(folder, intermediate_size=128)
    message = message_of(load_model, folder, kind=CheckpointError)
    assert (
        "[96, 64], but the config asks for [128, 64], and" in message or "[64, 96], but the config" in message
    )


def test_nan(folder):
    edit_weights(folder, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"][3].fill_(float("nan")))
    message = message_of(load_model, folder, kind=NumericsError)
    assert "model.layers.2.mlp.up_proj.weight" in message and "model.safetensors" in message


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in message_of(load_model, folder, kind=CheckpointError)


def test_architectures_that_transformers_does_not_have(folder):
    edit_config(folder, architectures=["LlamaForJuggling"])
    assert "no architecture 'LlamaForJuggling'" in message_of(load_model, folder, kind=ModelError)
    edit_config(folder, architectures=["AutoConfig"])
    assert "no architecture 'AutoConfig'" in message_of(load_model, folder, kind=ModelError)
    edit_config(folder, model_type="juggler")
    assert "does not know model_type 'juggler'" in message_of(load_model, folder, kind=ModelError)


def test_own_code_is_refused(folder):
    (folder / "modeling_juggler.py").write_text("raise SystemExit('this ran')")
    edit_config(folder, model_type="juggler", auto_map={"AutoConfig": "modeling_juggler.JugglerConfig"})
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "no code that comes with a checkpoint" in caught.value.hint
    edit_config(folder, model_type="llama")  # transformers' own class is there, so the code is not needed
    assert type(load_model(folder)).__name__ == "LlamaForCausalLM"


def test_config_with_nonsense(folder):
    edit_config(folder, hidden_size="wide")
    message = message_of(load_model, folder, kind=CheckpointError)
    assert "config.json" in message and "hidden_size" in message
    edit_config(folder, hidden_size=60)
    message_of(load_model, folder, kind=CheckpointError)


def test_empty_model_of_a_bad_config():
    with pytest.raises(ModelError, match="model_type None"):
        empty_model({})
    with pytest.raises(ModelError, match="not a multiple"):
        empty_model({"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3})


def test_tokenizer_of_another_model(folder):
    edit_config(folder, vocab_size=300)
    assert "token 319" in message_of(load_tokenizer, folder, kind=CheckpointError)


def test_tokenizer_that_is_missing_or_broken(folder):
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in message_of(load_tokenizer, folder, kind=CheckpointError)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in message_of(load_tokenizer, folder, kind=CheckpointError)


def test_a_damaged_tokenizer_is_refused_whatever_packages_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("attar.models.loading.load.SENTENCEPIECE", ("nosuch.package", "nosuch"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="needs the packages sentencepiece and protobuf"):
        read_tokenizer(tmp_path)
