"""ULD and GOLD on merged probabilities, against references of their own in float64."""

import itertools

import pytest
import torch

from attar.distillation.objectives import OBJECTIVES
from attar.distillation.signals.alignment.gold import GroupSide, Matching, gold_values, merged, uld_values
from attar.distillation.signals.alignment.uld import sorted_distance

NONE = torch.zeros(0, dtype=torch.int64)


def rows(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def side(last, *earlier):
    """Groups by the row of their last token; earlier ones as (row, token, group)."""
    columns = torch.tensor(earlier, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return GroupSide(torch.tensor(last), *columns)


def test_a_span_is_the_actual_tokens_before_and_the_last_distribution():
    logits = rows(5, 7, 0)
    p = logits.softmax(-1)
    start_log, log_p = [], []
    whole, start = merged(logits, side([2, 4], (0, 3, 0), (1, 6, 0), (3, 2, 1)))
    for values, first in zip(whole, start, strict=True):
        log_p.append(values), start_log.append(first)
    assert torch.allclose(log_p[0].exp() * start_log[0].exp(), p[0, 3] * p[1, 6] * p[2])
    assert torch.allclose(log_p[1].exp() * start_log[1].exp(), p[3, 2] * p[4])


def test_the_sorted_distance_is_that_of_the_paper():
    """The least sum of absolute differences over all ways to pair the tokens, for vocabularies of two
    sizes."""
    p, q = rows(3, 6, 1).softmax(-1), rows(3, 4, 2).softmax(-1)
    for one, other, value in zip(p.tolist(), q.tolist(), sorted_distance(q, p).tolist(), strict=True):
        padded = [*other, 0.0, 0.0]
        least = min(
            sum(abs(a - b) for a, b in zip(one, order, strict=True))
            for order in itertools.permutations(padded)
        )
        assert value == pytest.approx(least, abs=1e-12)
    assert torch.equal(sorted_distance(p, p.flip(-1)), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "hard"])
@pytest.mark.parametrize("T", [1.0, 2.0])
def test_one_vocabulary_gives_the_plain_objective(name, T):
    z, t = rows(6, 9, 3), rows(6, 9, 4)
    everything, number = torch.arange(9), list(range(6))
    plain, _ = OBJECTIVES[name](z.clone(), t.clone(), T)
    matching = Matching(everything, everything, (NONE, NONE))
    values = gold_values(z, t, side(number), side(number), matching, OBJECTIVES[name], T)
    assert torch.allclose(values, plain, rtol=1e-6, atol=1e-12)


def kl(p, q):
    return float((p * (p / q).log()).sum())


def test_unmatched_tokens_are_one_outcome_and_sorted():
    """By hand: tokens 0..2 of the student are tokens 3, 1, 0 of the teacher."""
    z, t = rows(2, 5, 5), rows(2, 6, 6)
    ours, theirs = torch.tensor([0, 1, 2]), torch.tensor([3, 1, 0])
    matching = Matching(ours, theirs, (torch.tensor([3, 4]), torch.tensor([2, 4, 5])))
    number = [0, 1]
    values = gold_values(z, t, side(number), side(number), matching, OBJECTIVES["kl"])
    for q, p, value in zip(z.softmax(-1), t.softmax(-1), values.tolist(), strict=True):
        q_all = torch.stack([q[0], q[1], q[2], q[3] + q[4]])
        p_all = torch.stack([p[3], p[1], p[0], p[2] + p[4] + p[5]])
        one, other = sorted([*q[3:].tolist(), 0.0]), sorted(p[[2, 4, 5]].tolist())
        unmatched = sum(abs(a - b) for a, b in zip(one, other, strict=True))
        assert value == pytest.approx(kl(p_all, q_all) + unmatched, rel=1e-9)


def test_a_span_of_two_tokens_against_one():
    """The student spells the teacher's token 1 as 2, 0: matched is its token 0 after 2, alone."""
    z, t = rows(2, 4, 7), rows(1, 3, 8)
    matching = Matching(torch.tensor([0]), torch.tensor([1]), None)
    value = gold_values(z, t, side([1], (0, 2, 0)), side([0]), matching, OBJECTIVES["kl"])
    q, p = z.softmax(-1), t.softmax(-1)[0]
    one = q[0, 2] * q[1, 0]
    wanted = kl(torch.stack([p[1], 1 - p[1]]), torch.stack([one, 1 - one]))
    assert value.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["kl", "reverse-kl", "jsd", "uld"])
def test_gradients_by_finite_differences(name):
    z, t = rows(4, 5, 9), rows(3, 6, 10)
    ours, theirs = side([1, 3], (0, 2, 0), (2, 4, 1)), side([0, 2], (1, 1, 1))
    matching = Matching(torch.tensor([0, 3]), torch.tensor([1, 2]), None)

    def loss(x):
        if name == "uld":
            return uld_values(x, t, ours, theirs).sum()
        return gold_values(x, t, ours, theirs, matching, OBJECTIVES[name], 1.5).sum()

    assert torch.autograd.gradcheck(loss, z.clone().requires_grad_(), eps=1e-6, atol=1e-6)


def test_a_teacher_without_other_tokens_teaches_that_they_are_improbable():
    """All of its tokens are matched, the student has one more: its mass does not stay."""
    z, t = torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    z.requires_grad_()
    every = torch.arange(3)
    matching = Matching(every, every, (torch.tensor([3]), NONE))
    one = side([0])
    (gradient,) = torch.autograd.grad(gold_values(z, t, one, one, matching, OBJECTIVES["kl"]).sum(), z)
    assert gradient[0, 3] > 0.2
