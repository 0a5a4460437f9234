"""The importance matrix of the sweep against hooks on a whole model run in one piece."""

import pytest
import torch
from torch import nn

from attar.checkpoint import open_checkpoint
from attar.deployment import imatrix
from attar.deployment.imatrix import compute, head_sums
from attar.errors import NumericsError
from attar.models.anatomy.discover import discover
from attar.models.loading.load import load_model
from attar.walks.sweep import SweepOptions, observe
from tests import tiny_models


def saved(folder, family, **changes):
    return open_checkpoint(tiny_models.save(tiny_models.build(family, **changes), folder))


def text(model, count=3):
    rows = tiny_models.tokens(model, batch=2 * count, length=12)
    return [*rows[:-1].split(2)]  # the last batch is smaller


def by_hooks(model, batches):
    """Sums of squares in float64 by parameter name, and tokens."""
    anatomy, actual = discover(model), {}

    def note(name):
        def hook(_, args):
            actual[name] = actual.get(name, 0) + args[0].flatten(0, 1).double().square().sum(0)

        return hook

    for name in [*[name for block in anatomy.blocks for name in block.linears], anatomy.head]:
        model.get_submodule(name).register_forward_pre_hook(note(name))
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    return actual, sum(batch.numel() for batch in batches)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", ["llama2", "smollm", "gpt2", "gemma3", "phi3", "qwen2", "gpt_neox", "bert"]
)
def test_sums_are_those_of_plain_hooks(tmp_path, family):
    checkpoint = saved(tmp_path / "model", family)
    model = load_model(checkpoint, dtype=torch.float32)
    batches = text(model)
    wanted, tokens = by_hooks(model, batches)
    result = compute(checkpoint, batches, work=tmp_path / "work", precision="fp32")
    anatomy = discover(model)
    head = anatomy.embedding if anatomy.tied else {"gpt_neox": "embed_out"}.get(family, anatomy.head)
    names = {f"{name}.weight": sums for name, sums in wanted.items() if name != anatomy.head}
    names[f"{head}.weight"] = wanted[anatomy.head]
    assert sorted(result) == sorted(names) and all(name in checkpoint.tensors for name in result)
    for name, sums in names.items():
        in_sum2, count = result[name]
        assert in_sum2.dtype == torch.float32 and count == tokens
        torch.testing.assert_close(in_sum2.double(), sums, rtol=1e-4, atol=1e-6 * float(sums.max()))


def test_a_model_without_a_head_has_no_head(tmp_path):
    model = tiny_models.build("llama2").base_model
    checkpoint = open_checkpoint(tiny_models.save(model, tmp_path / "model"))
    result = compute(checkpoint, text(model), work=tmp_path / "work", precision="fp32")
    assert len(result) == 3 * 7


def test_a_finished_run_is_read_back_and_a_killed_one_starts_again(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path / "model", "llama2")
    batches = text(load_model(checkpoint))
    whole = compute(checkpoint, batches, work=tmp_path / "whole", precision="fp32")

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(imatrix, "_run_head", dies)
        with pytest.raises(KeyboardInterrupt):
            compute(checkpoint, batches, work=tmp_path / "cut", precision="fp32")
    again = compute(checkpoint, batches, work=tmp_path / "cut", precision="fp32")
    monkeypatch.setattr(imatrix, "observe", dies)
    read = compute(checkpoint, batches, work=tmp_path / "cut", precision="fp32")
    for actual in (again, read):
        assert sorted(actual) == sorted(whole)
        assert all(torch.equal(actual[name][0], sums) for name, (sums, _) in whole.items())
        assert all(actual[name][1] == count for name, (_, count) in whole.items())
    assert "behind" not in [file.name for file in (tmp_path / "cut").iterdir()]


def test_hidden_states_may_wait_on_disk(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path / "model", "smollm")
    batches = text(load_model(checkpoint))
    wanted = compute(checkpoint, batches, work=tmp_path / "a", precision="fp32")
    monkeypatch.setattr(imatrix, "MEMORY", 0)
    result = compute(checkpoint, batches, work=tmp_path / "b", precision="fp32")
    assert all(torch.equal(result[name][0], sums) for name, (sums, _) in wanted.items())


def test_an_input_that_is_not_finite_is_named():
    inputs, linear = imatrix._SquaredInputs(), nn.Linear(4, 2)
    inputs.watch("model.layers.0.mlp.down_proj", linear)
    with pytest.raises(NumericsError, match=r"layers\.0\.mlp\.down_proj is not finite"):
        linear(torch.tensor([[1.0, torch.inf, 0.0, 0.0]]))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama2", "gpt_neox"])
def test_the_heads_importance_comes_from_the_sweep_that_rounds(family, tmp_path):
    checkpoint = saved(tmp_path / "model", family)
    batches = text(load_model(checkpoint, dtype=torch.float32))
    whole = compute(checkpoint, batches, work=tmp_path / "work", precision="fp32")
    seen = {}
    observe(
        checkpoint,
        batches,
        SweepOptions(
            work=tmp_path / "sweep",
            precision="fp32",
            after_blocks=lambda *arguments: seen.update(head_sums(*arguments)),
        ),
    )
    [(name, (sums, count))] = seen.items()
    assert count == whole[name][1]
    torch.testing.assert_close(sums, whole[name][0])
