"""Two checkpoints side by side, against both models run whole."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attar.checkpoint import open_checkpoint
from attar.models.loading.load import load_model, save_model
from attar.sensitivity import compare as comparing
from attar.sensitivity.compare import compare
from attar.walks import objectives
from tests import tiny_models


def changed_copy(folder, source, change):
    model = load_model(source, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    save_model(model, folder)
    return open_checkpoint(folder)


def tokens(vocabulary):
    g = torch.Generator().manual_seed(2)
    return [torch.randint(5, vocabulary, (2, 10), generator=g) for _ in range(3)]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_agrees_with_both_models_run_whole(tmp_path, family):
    original = open_checkpoint(tiny_models.save(tiny_models.build(family), tmp_path / "original"))
    batches = tokens(240)

    def noise(model):
        g = torch.Generator().manual_seed(0)
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))

    changed = changed_copy(tmp_path / "changed", original, noise)
    result = compare(original, changed, batches, work=tmp_path / "work")
    p, q = (
        torch.cat([tiny_models.logits(load_model(side, dtype=torch.float32), batch) for batch in batches])
        .float()
        .log_softmax(-1)
        for side in (original, changed)
    )
    wanted = float((p.exp() * (p - q)).sum(-1).mean())
    assert result.kl == pytest.approx(wanted, rel=2e-3, abs=1e-6)
    assert result.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=0.02)
    assert result.tokens == 60 and len(result.drift) == len(list(result.drift)) > 1


def test_each_side_may_round_its_activations(tmp_path):
    original = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "original"))

    def halve(model):
        model.model.norm.register_forward_hook(lambda module, args, output: output / 2)

    both, one = (
        compare(
            original, original, tokens(240), work=tmp_path / "work", prepare=halve, prepare_original=other
        )
        for other in (halve, None)
    )
    assert both.kl == 0.0 and one.kl > 0.01


def test_equal_checkpoints_do_not_differ(tmp_path):
    original = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "original"))
    result = compare(original, original, tokens(240), work=tmp_path / "work")
    assert result.kl == 0.0 and result.top1 == 1.0 and set(result.drift) == {0.0}


@pytest.mark.few(1)
@pytest.mark.parametrize("guilty", [0, 1])
def test_the_block_that_was_destroyed_is_named(tmp_path, guilty):
    original = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "original"))

    def destroy(model):
        for block in model.model.layers:
            block.mlp.up_proj.weight.mul_(1.001)
        model.model.layers[guilty].mlp.down_proj.weight.mul_(-30.0)

    changed = changed_copy(tmp_path / "changed", original, destroy)
    assert compare(original, changed, tokens(240), work=tmp_path / "work").worst == guilty


class Allocated(TorchDispatchMode):
    """The most bytes of one tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self.largest = max(self.largest, value.numel() * value.element_size())
        return result


@pytest.mark.slow
def test_logits_of_a_large_vocabulary_never_stand_in_memory_whole(tmp_path, monkeypatch):
    """No tensor grows with tokens times vocabulary; what is kept between two heads has its own limit."""
    vocabulary, head = 4096, 4096 * 16 * 4
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = tiny_models.build("qwen3", vocab_size=vocabulary, **small)
    original = open_checkpoint(tiny_models.save(model, tmp_path / "original"))
    changed = changed_copy(
        tmp_path / "changed", original, lambda model: model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    )
    batches = [
        torch.randint(5, vocabulary, (4, 24), generator=torch.Generator().manual_seed(n)) for n in (0, 1)
    ]
    whole = compare(original, changed, batches, work=tmp_path / "work")
    monkeypatch.setattr(comparing, "CHUNK", 10 * 4 * vocabulary)
    monkeypatch.setattr(comparing, "KEPT", 40 * 4 * vocabulary)
    monkeypatch.setattr(objectives, "CHUNK_ELEMENTS", 8 * vocabulary)
    with Allocated() as seen:
        parts = compare(original, changed, batches, work=tmp_path / "work")
    assert seen.largest <= max(head, 10 * 8 * vocabulary), seen.largest  # all logits: 3 MiB
    assert parts.kl == pytest.approx(whole.kl, rel=1e-6) and parts.kl > 0
    assert parts.blind == pytest.approx(whole.blind, rel=1e-6)
    assert (parts.top1, parts.tokens) == (whole.top1, whole.tokens)
    assert parts.drift == whole.drift


class Counted:
    """A progress of one task: its length, and the units that were done one after the other."""

    def __init__(self):
        self.total, self.units = 0, []

    @contextmanager
    def task(self, what, total, done=0):
        self.total = total
        yield self

    def advance(self, n=1, **numbers):
        self.units.append(n)


def test_the_head_counts_as_many_blocks_as_it_takes(tmp_path):
    original = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "original"))
    counted = Counted()
    compare(original, original, tokens(240), work=tmp_path / "work", progress=counted)
    block = sum(math.prod(info.shape) for name, info in original.tensors.items() if ".0." in name)
    vocabulary, hidden = original.config["vocab_size"], original.config["hidden_size"]
    wanted = round(vocabulary * (hidden + 650) / block)
    assert counted.units[-1] == wanted > 1
    assert counted.units[:-1] == [1] * original.config["num_hidden_layers"]
    assert sum(counted.units) == counted.total
