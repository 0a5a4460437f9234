"""Training in several processes is training in one, plain or with the model divided (FSDP2), and a run that
two began, one or three end."""

import pytest
import torch

from attar.data.examples import Examples
from attar.walks.distributed import passes_of, share
from tests.scale import training
from tests.scale.processes import run_ranks

GRADIENT = 1e-5  # of a matrix's largest
ROUNDING = 0.01  # of the learning rate, which AdamW's step is, however small and rounded the gradient
FEW = 1e-3  # of a matrix's elements: those whose gradients are hardly more than rounding


@pytest.mark.parametrize(("micro", "rows", "ranks"), [(1, 4, 2), (4, 2, 2), (3, 3, 2), (2, 5, 3), (1, 2, 3)])
def test_processes_share_every_row_of_a_step_once(micro, rows, ranks):
    numbers = torch.arange(micro * rows * 3).view(micro, rows, 3)
    batches = [Examples.of_text(part) for part in numbers]
    shares = [share(batches, rank, ranks) for rank in range(ranks)]
    assert {len(parts) for parts in shares} == {passes_of(micro, ranks)}
    counted = [batch.tokens for parts in shares for batch, n in parts if n]
    assert sorted(torch.cat(counted).flatten().tolist()) == numbers.flatten().tolist()
    assert all(n in (0, batch.count()) for parts in shares for batch, n in parts)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_gradients_of_two_processes_are_those_of_one(tmp_path, shard):
    run_ranks(training.gradients_of_all, 2, str(tmp_path), shard)
    for case, (_, changes) in training.CASES.items():
        one, two = training.gradients(case), torch.load(tmp_path / f"{case}.pt")
        assert one.keys() == two.keys()
        for name, gradient in one.items():
            assert (gradient is None) == (two[name] is None), (case, name)
            if gradient is not None:
                bound = GRADIENT if changes.get("precision") != "bf16" else 2.0**-6
                off = float((two[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12))
                assert off < bound, (case, name)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_two_processes_end_as_one(tmp_path, shard):
    run_ranks(training.learn_all, 2, str(tmp_path), shard)
    for case, (_, changes) in training.CASES.items():
        weights, history = training.learn(case)
        two = torch.load(tmp_path / f"{case}.pt")
        rate, short = (
            changes.get("learning_rate", training.SETTINGS.learning_rate),
            "bf16" in changes.values(),
        )
        bound = (1.0 if short else ROUNDING) * rate  # in bfloat16 a step may go the other way
        for name, weight in weights.items():
            off = (two["weights"][name] - weight).abs()
            assert float((off > bound).float().mean()) <= (0.02 if short else FEW), (case, name)
            assert float(off.max()) < (4.0 if short else 0.1) * rate, (case, name)
        for ours, theirs in zip(history.curve, two["curve"], strict=True):
            assert ours == pytest.approx(theirs, abs=10 * bound if short else max(1e-5, bound)), case


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True], ids=["replicated", "sharded"])
def test_one_or_three_go_on_with_what_two_began(tmp_path, before):
    weights, history = training.learn("tied")
    for count, after in ((1, False), (3, before), (2, not before)):
        work, out = tmp_path / f"work-{count}", tmp_path / f"{count}.pt"
        run_ranks(training.start_and_stop, 2, str(work), before)
        assert [path.name for path in work.glob("state-*")] == ["state-00000002"]
        run_ranks(training.go_on, count, str(work), str(out), after)
        other = torch.load(out)
        assert [row["step"] for row in other["curve"]] == [row["step"] for row in history.curve]
        for name, weight in weights.items():
            assert float((other["weights"][name] - weight).abs().max()) < 1e-5, (count, name)
