"""The sweep walk against a plain forward pass with everything in memory."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.models.load import load_model
from attar.quantization.hessian import Hessian
from attar.walks.sweep import Solution, sweep
from benchmarks import memory
from tests import tiny_models


def save_family(family, folder, **changes):
    return tiny_models.save(tiny_models.build(family, **changes), folder)


class Recorder:
    """A solver that keeps each layer's Hessian and changes nothing."""

    def __init__(self, change=0.0):
        self.seen, self.change, self.accumulators = {}, change, 0

    def accumulator(self, inputs):
        self.accumulators += 1
        return Hessian(inputs)

    def solve(self, name, weight, seen):
        self.seen[name] = seen.value()
        new = weight * (1 + self.change)
        return Solution(new, {"weight": new}, {"error": 0.5})

    def restore(self, name, tensors):
        return tensors["weight"]


def batches(vocabulary, count=3, size=2, length=12):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocabulary - 1, (size, length), generator=g) for _ in range(count)]


def hessians_by_hooks(model, names, tokens):
    """The Hessians of a whole model run in one piece."""
    found = {
        name: Hessian(
            (m := model.get_submodule(name)).weight.shape[1 if isinstance(m, torch.nn.Linear) else 0]
        )
        for name in names
    }
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: found[name].add(args[0])
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in tokens:
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: h.value() for name, h in found.items()}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_sees_what_a_whole_forward_pass_sees(tmp_path, family):
    checkpoint = open_checkpoint(save_family(family, tmp_path / "model"))
    model = load_model(checkpoint, dtype=torch.float32)
    tokens = batches(min(model.get_input_embeddings().num_embeddings, 250))
    recorder = Recorder()
    swept = sweep(checkpoint, tokens, recorder, work=tmp_path / "work")
    wanted = hessians_by_hooks(model, list(recorder.seen), tokens)
    assert len(swept.reports) == len(recorder.seen) == len(swept.block_of) > 0
    for name, H in wanted.items():
        assert torch.allclose(H, recorder.seen[name], rtol=1e-3, atol=1e-4 * H.abs().max()), name


def test_later_layers_see_the_new_weights_of_earlier_ones(tmp_path):
    """True sequential: after a change, every Hessian is that of the changed model up to there."""
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    model = load_model(checkpoint, dtype=torch.float32)
    tokens = batches(250)
    recorder = Recorder(change=0.3)
    sweep(checkpoint, tokens, recorder, work=tmp_path / "work")
    with torch.no_grad():
        for name in recorder.seen:
            model.get_submodule(name).weight.mul_(1.3)
    wanted = hessians_by_hooks(model, list(recorder.seen), tokens)
    for name, H in wanted.items():
        assert torch.allclose(H, recorder.seen[name], rtol=1e-3, atol=1e-4 * H.abs().max()), name


def test_layers_with_one_input_share_an_accumulator(tmp_path):
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    recorder = Recorder()
    swept = sweep(checkpoint, batches(250), recorder, work=tmp_path / "work")
    assert recorder.accumulators == 4 * len(swept.files)  # qkv, o, gate and up, down


@pytest.mark.parametrize("died_in", [0, 1])
def test_a_killed_sweep_goes_on_at_its_block(tmp_path, died_in):
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    tokens = batches(250)
    whole = sweep(checkpoint, tokens, Recorder(0.1), work=tmp_path / "whole")

    class Dying(Recorder):
        def solve(self, name, weight, seen):
            if f"layers.{died_in}.mlp" in name:
                raise KeyboardInterrupt
            return super().solve(name, weight, seen)

    with pytest.raises(KeyboardInterrupt):
        sweep(checkpoint, tokens, Dying(0.1), work=tmp_path / "cut")
    again = Recorder(0.1)
    resumed = sweep(checkpoint, tokens, again, work=tmp_path / "cut")
    assert not any(f"layers.{number}." in name for name in again.seen for number in range(died_in))
    assert resumed.reports == whole.reports
    for ours, theirs in zip(resumed.files, whole.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_spilled_activations_give_the_same_bytes(tmp_path):
    checkpoint = open_checkpoint(save_family("qwen2", tmp_path / "model"))
    kept = sweep(checkpoint, batches(250), Recorder(0.1), work=tmp_path / "kept")
    spilled = sweep(checkpoint, batches(250), Recorder(0.1), work=tmp_path / "spilled", spill_bytes=3000)
    for ours, theirs in zip(kept.files, spilled.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert not (tmp_path / "spilled/activations").exists()


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_depth(tmp_path):
    """Peak RSS above the imports stays under 1.5 x (block + activations + accumulators), for 3 and for 12
    blocks."""
    used = {depth: memory.sweep_peak(tmp_path, depth) for depth in (3, 12)}
    libraries = 40e6  # buffers of the matrix products, whatever the model
    assert 60e6 < min(used.values()) <= max(used.values()) < memory.sweep_bound() + libraries, used
    assert used[12] < 1.2 * used[3] + 20e6, used
