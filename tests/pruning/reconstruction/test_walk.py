"""Reconstruction in the verb: what stays exact, what gets better, what survives a kill."""

import json
from pathlib import Path

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.cli.main import call
from attar.errors import SettingsError
from attar.models.loading.load import load_model
from attar.pruning.reconstruction import walk
from attar.pruning.settings import METHOD_SETTINGS, prune_settings
from attar.pruning.stage import prune
from tests import tiny_models

SMALL = {
    "samples": 8,
    "sequence_length": 32,
    "batch_size": 4,
    "reconstruct_epochs": 2,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),
}


def pruned(folder, out, **options):
    return prune(folder, out, prune_settings(**{**SMALL, **options}))


def blocks_weights(checkpoint):
    return {n: checkpoint.load(n) for n in checkpoint.tensors if ".layers." in n and "proj" in n}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["linear", "block"])
@pytest.mark.parametrize("sparsity", ["2:4", 0.6])
def test_zeros_stay_bit_for_bit(tmp_path, kind, sparsity):
    """The mask is that of the method alone; all that the mask keeps may change, and does."""
    folder = tiny_models.save(tiny_models.build("llama3", num_hidden_layers=2), tmp_path / "model")
    plain = pruned(folder, tmp_path / "none", method="wanda", sparsity=sparsity, reconstruct="none")
    whole = pruned(folder, tmp_path / kind, method="wanda", sparsity=sparsity, reconstruct=kind)
    assert whole.card.details["reconstruct"] == kind
    for (name, before), after in zip(
        blocks_weights(plain).items(), blocks_weights(whole).values(), strict=True
    ):
        assert torch.equal(before == 0, after == 0), name
        assert not torch.equal(before, after), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "phi3", "opt", "bert"])
@pytest.mark.parametrize("kind", ["linear", "block"])
def test_every_family_is_reconstructed(tmp_path, family, kind):
    """Conv1D, fused modules, biases, encoders: closer to the original than the zeros alone."""
    model = tiny_models.build(family)
    folder = tiny_models.save(model, tmp_path / "model")
    rows = tiny_models.tokens(model, batch=8, length=32)
    whole, off = tiny_models.logits(model, rows), {}
    for reconstruct in ("none", kind):
        out = pruned(
            folder,
            tmp_path / reconstruct,
            method="magnitude",
            samples=32,
            reconstruct=reconstruct,
            reconstruct_epochs=1,
        )
        off[reconstruct] = float((tiny_models.logits(load_model(out), rows) - whole).square().mean())
    assert off[kind] < off["none"]
    source = open_checkpoint(folder)
    biases = [name for name in source.tensors if name.endswith(".bias")]
    assert bool(biases) == any(not torch.equal(out.load(name), source.load(name)) for name in biases)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heads", "neurons", "query-heads"])
def test_units_are_reconstructed_before_the_cut(tmp_path, method):
    model = tiny_models.build("llama3", num_hidden_layers=2)
    folder = tiny_models.save(model, tmp_path / "model")
    outs = {
        kind: pruned(folder, tmp_path / kind, method=method, ratio=0.5, reconstruct=kind)
        for kind in ("none", "linear", "block")
    }
    shapes = [{n: i.shape for n, i in out.tensors.items()} for out in outs.values()]
    assert shapes[0] == shapes[1] == shapes[2] and outs["none"].config == outs["linear"].config
    changed = "o_proj" if "heads" in method else "down_proj"
    before, after = (blocks_weights(outs[kind]) for kind in ("none", "linear"))
    for name in before:
        assert torch.equal(before[name], after[name]) == (changed not in name), name


@pytest.mark.slow
def test_layers_after_a_gap_are_reconstructed(tmp_path, monkeypatch):
    skipped = []
    for name in ("sweep_linears", "sweep_blocks"):
        plain = getattr(walk, name)
        noted = lambda *given, plain=plain: skipped.append(given[-1].skip) or plain(*given)  # noqa: E731
        monkeypatch.setattr(walk, name, noted)
    folder = tiny_models.save(tiny_models.build("llama3", num_hidden_layers=4), tmp_path / "model")
    outs = {
        kind: pruned(folder, tmp_path / kind, method="layers", ratio=0.25, reconstruct=kind)
        for kind in ("none", "linear", "block")
    }
    (gone,) = outs["none"].card.details["kept"]["removed_layers"]
    assert skipped == [[gone]] * 3  # linear, and linear with block
    before = blocks_weights(outs["none"])
    for kind in ("linear", "block"):
        for name, after in blocks_weights(outs[kind]).items():
            number = int(name.split(".")[2])
            assert torch.equal(before[name], after) == (number < gone), (kind, name)


def test_the_default_is_linear_where_it_wins():
    """Magnitude reads no text; after removed layers least squares may make a model worse; experts that stay
    are as they were."""
    kinds = {
        method: prune_settings(method=method).reconstruction
        for method in METHOD_SETTINGS
        if method != "mixed"  # wants a size
    }
    plain = [method for method, kind in kinds.items() if kind == "none"]
    assert set(kinds.values()) == {"none", "linear"} and set(plain) == {
        "magnitude",
        "hidden",
        "layers",
        "experts",
    }


@pytest.mark.parametrize("kind", ["linear", "block"])
def test_a_narrower_stream_is_refused_in_one_line(kind, capsys):
    with pytest.raises(SettingsError, match="reconstruct"):
        prune_settings(method="hidden", reconstruct=kind)
    arguments = ["prune", "attar:tiny", "-o", "x", "--method", "hidden", "--reconstruct", kind]
    assert call(arguments) == 2
    assert "attar recover" in capsys.readouterr().err


class Killed(Exception):  # noqa: N818  (no error)
    """Stands for kill -9: what follows is what a new process does."""


@pytest.mark.few(1)
@pytest.mark.parametrize("died_in", ["reconstruct-linear", "reconstruct-block"])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, monkeypatch, died_in):
    from attar.walks import block_runner

    folder = tiny_models.save(tiny_models.build("llama3", num_hidden_layers=2), tmp_path / "model")
    options = {"method": "wanda", "sparsity": "2:4", "reconstruct": "block"}
    whole = pruned(folder, tmp_path / "whole", **options)
    plain = block_runner.write_solutions

    def dying(file, solutions):
        if file.parent.name == died_in and file.name == "block-00001.safetensors":
            raise Killed
        plain(file, solutions)

    monkeypatch.setattr(block_runner, "write_solutions", dying)
    with pytest.raises(Killed):
        pruned(folder, tmp_path / "out", **options)
    written = []
    monkeypatch.setattr(
        block_runner, "write_solutions", lambda file, s: written.append(str(file)) or plain(file, s)
    )
    resumed = pruned(folder, tmp_path / "out", **options)
    assert not any("/blocks/" in file or f"{died_in}/block-00000" in file for file in written)
    assert any(f"{died_in}/block-00001" in file for file in written)
    for name in whole.tensors:
        assert torch.equal(whole.load(name), resumed.load(name)), name


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama3", num_hidden_layers=2), tmp_path / "model")
    options = {"method": "magnitude", "reconstruct": "block"}
    first, second = (pruned(folder, tmp_path / name, **options) for name in ("a", "b"))
    files = [open_checkpoint(out.path).path / "model.safetensors" for out in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()
