"""Losses of sampled text against enumeration: three tokens, of which one ends, and rows of at most three."""

import itertools
import math

import pytest
import torch

from attar.distillation.objectives import OBJECTIVES
from attar.distillation.objectives.chunked import mean_of_chunks
from attar.distillation.outputs import ModelOutputs
from attar.distillation.policy import minillm, policy_gradient
from attar.distillation.policy.returns import later, returns, rewards
from attar.distillation.rollouts.buffer import as_text
from attar.distillation.rollouts.sampling import Rollouts, completions, joined
from attar.distillation.signals.online import OnlineTarget
from attar.distillation.signals.policy import policy_target

END, LONGEST = 0, 3
SEQUENCES = [
    row
    for length in range(1, LONGEST + 1)
    for row in itertools.product((END, 1, 2), repeat=length)
    if END not in row[:-1] and (row[-1] == END or length == LONGEST)
]
PREFIXES = [row for length in range(LONGEST) for row in itertools.product((1, 2), repeat=length)]


def table(seed, size=1.0):
    """A model: logits of each prefix."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), 3, generator=g, dtype=torch.float64) * size


def rows_of(model, row):
    """Its logits at each position of a sequence, differentiable."""
    return model[[PREFIXES.index(row[:t]) for t in range(len(row))]]


def logprobs(model, row, T=1.0):
    return (rows_of(model, row) / T).log_softmax(-1).gather(1, torch.tensor(row)[:, None])[:, 0]


def mixture(p, q, a):
    return (a * p.softmax(-1) + (1 - a) * q.softmax(-1)).log()


def batch_of(row, behaviour, policy, width=5):
    """A row behind a prompt of one token, padded."""
    pad = width - 1 - len(row)
    tokens = torch.tensor([[2, *row, *[-100] * pad]])
    fill = [torch.cat([x.new_zeros(1), x, x.new_zeros(pad)])[None] for x in (behaviour, policy)]
    return Rollouts.of(tokens, torch.tensor([1]), *fill)


def loss_of(of_minillm, row, student, teacher, behaviour, writer, T=1.0, width=5):
    """The sum of the loss over a row's tokens."""
    with torch.no_grad():
        log_b, log_w, log_p = (logprobs(model, row, T) for model in (behaviour, writer, teacher))
    batch = batch_of(row, log_b, log_w, width)
    outputs = ModelOutputs(rows_of(teacher, row), None, batch.mask, batch.mask)
    target = OnlineTarget(outputs, OBJECTIVES["reverse-kl"], T)
    judged = torch.zeros(batch.tokens.shape, dtype=torch.float64).masked_scatter(batch.predicted, log_p)
    slopes = policy_target(target, batch, judged, minillm=of_minillm).loss_and_grad
    return len(row) * mean_of_chunks(slopes, rows_of(student, row))


def expected_gradient(of_minillm, student, teacher, behaviour=None, writer=None, T=1.0):
    """The mean gradient over all sequences that ``behaviour`` can draw."""
    student = student.clone().requires_grad_()
    behaviour, writer = (student.detach() if x is None else x for x in (behaviour, writer))
    total = 0.0
    for row in SEQUENCES:
        weight = logprobs(behaviour, row, T).sum().exp()
        total = total + weight * loss_of(of_minillm, row, student, teacher, behaviour, writer, T)
    return torch.autograd.grad(total, student)[0]


def exact_gradient(student, teacher, T=1.0):
    """Of T^2 KL(q || p) of whole sequences."""
    student = student.clone().requires_grad_()
    pairs = [(logprobs(student, row, T).sum(), logprobs(teacher, row, T).sum()) for row in SEQUENCES]
    kl = sum(log_q.exp() * (log_q - log_p) for log_q, log_p in pairs)
    return torch.autograd.grad(T**2 * kl, student)[0]


def test_the_world_is_whole():
    assert len(SEQUENCES) == 15
    assert sum(float(logprobs(table(0), row).sum().exp()) for row in SEQUENCES) == pytest.approx(1.0)


def returned(student, teacher, T=1.0):
    """Of the expectation of MiniLLM's loss by its definition, drawn by the student itself: at each token the
    KL of the next one, and its log-probability times the mean reward of all later tokens."""
    student = student.clone().requires_grad_()
    total = 0.0
    for row in SEQUENCES:
        log_q, log_p = logprobs(student, row, T), logprobs(teacher, row, T)
        reward = (log_p - log_q).detach()
        at, other = ((rows_of(model, row) / T).log_softmax(-1) for model in (student, teacher))
        loss = (at.exp() * (at - other)).sum()
        for t in range(len(row) - 1):
            loss = loss - log_q[t] * reward[t + 1 :].mean()
        total = total + log_q.sum().exp().detach() * T**2 * loss
    return torch.autograd.grad(total, student)[0]


@pytest.mark.parametrize("T", [1.0, 2.0])
def test_the_expected_gradient_of_minillm_is_that_of_its_definition(T):
    q, p = table(0), table(1)
    torch.testing.assert_close(expected_gradient(True, q, p, T=T), returned(q, p, T))


def test_the_ratio_of_each_token_makes_up_for_a_mixed_in_teacher_in_part():
    """The paper's approximation: the ratio of a token's own draw, not of those before the token."""
    q, p = table(0), table(1)
    b, exact = mixture(p, q, 0.2), returned(q, p)
    error = (expected_gradient(True, q, p, b, q) - exact).norm() / exact.norm()
    assert 0.01 < error < 0.3


def test_the_gradient_is_that_of_each_position():
    q, p = table(0), table(1)
    student = q.clone().requires_grad_()
    reached = {prefix: math.exp(float(logprobs(q, prefix).sum())) for prefix in PREFIXES}
    weight = torch.tensor([reached[prefix] for prefix in PREFIXES], dtype=torch.float64)
    log_q = student.log_softmax(-1)
    kl = (log_q.exp() * (log_q - p.log_softmax(-1))).sum(-1)
    wanted = torch.autograd.grad((weight * kl).sum(), student)[0]
    got = expected_gradient(False, q, p)
    torch.testing.assert_close(got, wanted)
    assert (got - exact_gradient(q, p)).norm() > 0.01


def test_the_ratio_makes_up_for_rows_of_an_older_student():
    """Rewards of the older student, weighed by the ratio at each token, at the older student's prefixes."""
    q, p, old = table(0), table(1), table(0) + 0.3 * table(2)
    student = q.clone().requires_grad_()
    total = 0.0
    for prefix in PREFIXES:
        at = PREFIXES.index(prefix)
        reached = math.exp(float(logprobs(old, prefix).sum()))
        reward = p.log_softmax(-1)[at] - old.log_softmax(-1)[at]
        total = total - reached * (student.softmax(-1)[at] * reward).sum()
    wanted = torch.autograd.grad(total, student)[0]
    torch.testing.assert_close(expected_gradient(False, q, p, old, old), wanted)


@pytest.mark.parametrize("of_minillm", [False, True])
def test_padding_changes_nothing(of_minillm):
    q, p, row = table(0), table(1), (1, 2, END)
    losses = [loss_of(of_minillm, row, q, p, mixture(p, q, 0.2), q, width=width) for width in (4, 5, 9)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-12, atol=0.0)


def test_prompts_of_any_length_are_not_predicted():
    tokens = torch.tensor([[5, 6, 7, 8, 9, -100], [5, 6, 7, 8, 9, 4]])
    examples = completions(tokens, torch.tensor([1, 4]))
    assert examples.targets.tolist() == [[6, 7, 8, 9, -100, -100], [-100, -100, -100, 9, 4, -100]]


def test_returns_are_sums_over_the_rest_of_a_row():
    r = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 4.0, 0.0, 0.0]])
    wanted = [[sum(row[i] for i in range(t, 4)) for t in range(4)] for row in r.tolist()]
    torch.testing.assert_close(returns(r), torch.tensor(wanted))
    torch.testing.assert_close(later(r), torch.tensor([[-2.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(rewards(r, torch.full((2, 4), -1.0)), r + 1.0)


def slow_advantage(log_p, policy, drawn, limit):
    """The definition, a token at a time."""
    advantage = torch.zeros_like(log_p)
    for b in range(len(log_p)):
        places = [t for t in range(log_p.shape[1]) if drawn[b, t]]
        for t in places:
            future = [i for i in places if i > t]
            total = sum(float((log_p[b, i] - policy[b, i]).clamp(-limit, limit)) for i in future)
            advantage[b, t] = total / max(len(future), 1)
    return advantage


@pytest.mark.parametrize("limit", [1.0, 10.0])
def test_terms_are_those_of_the_definition(limit, monkeypatch):
    monkeypatch.setattr(minillm, "REWARD_CLIP", limit)
    g = torch.Generator().manual_seed(0)
    drawn = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
    log_p, behaviour, policy = (
        -(torch.rand(3, 5, generator=g, dtype=torch.float64) * 3) * drawn for _ in range(3)
    )
    got = minillm.terms(log_p, behaviour, policy, drawn)
    torch.testing.assert_close(got.advantage, slow_advantage(log_p, policy, drawn, limit))
    assert torch.equal(got.step, drawn.double()) and torch.equal(got.anchor, behaviour)
    assert not got.text.any()


def chunk(seed=0, c=6, V=5):
    g = torch.Generator().manual_seed(seed)
    z, t = (torch.randn(c, V, generator=g, dtype=torch.float64) for _ in range(2))
    y = torch.randint(V, (c,), generator=g)
    near = z.log_softmax(-1).gather(1, y[:, None])[:, 0]
    anchor = near + 0.3 * torch.randn(c, generator=g, dtype=torch.float64)
    return z, t, y, anchor, torch.randn(c, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("T", [1.0, 3.0])
def test_slopes_of_the_policy_gradient_are_those_of_ppos_loss(clip, T):
    z, _, y, anchor, advantage = chunk()
    anchor = (
        anchor
        + (z / T).log_softmax(-1).gather(1, y[:, None])[:, 0]
        - z.log_softmax(-1).gather(1, y[:, None])[:, 0]
    )
    values, dz = policy_gradient.loss_and_grad(z, y, anchor, advantage, T, clip_ratio=clip)
    x = z.clone().requires_grad_()
    rho = ((x / T).log_softmax(-1).gather(1, y[:, None])[:, 0] - anchor).exp()
    wanted = -rho * advantage
    if clip:
        wanted = torch.maximum(wanted, -rho.clamp(1 - clip, 1 + clip) * advantage)
    torch.testing.assert_close(values, T**2 * wanted.detach())
    torch.testing.assert_close(dz, torch.autograd.grad(T**2 * wanted.sum(), x)[0])
    assert not clip or bool((dz == 0).all(1).any())  # some ratio is clipped


def test_slopes_of_minillm_agree_with_finite_differences():
    z, t, y, anchor, advantage = chunk()
    step, text = torch.tensor([1.0, 0.5, 0, 0, 1, 0]).double(), torch.tensor([0, 0, 2.0, 1.0, 0, 0]).double()

    def loss(x):
        def chunk_loss(part_z, part):
            given = (t[part], y[part], anchor[part], advantage[part], step[part], text[part])
            return minillm.loss_and_grad(part_z, *given, 2.0)

        return mean_of_chunks(chunk_loss, x)

    assert torch.autograd.gradcheck(loss, z.requires_grad_())


def test_text_in_a_batch_gets_its_own_mean():
    """The mean over drawn tokens, and the mean over read ones."""
    q, p, row, T = table(0), table(1), (1, 2, END), 1.0
    log_q, log_p = logprobs(q, row), logprobs(p, row)
    own = batch_of(row, log_q, log_q)
    text = as_text(batch_of((2, END), log_q[:2], log_q[:2]))
    batch = joined([own, text])
    z = torch.cat([rows_of(q, row), rows_of(q, (2, END))])
    t = torch.cat([rows_of(p, row), rows_of(p, (2, END))])
    target = OnlineTarget(ModelOutputs(t, None, batch.mask, batch.mask), OBJECTIVES["reverse-kl"], T)
    judged = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    judged[0, :3] = log_p
    loss = mean_of_chunks(policy_target(target, batch, judged, minillm=True).loss_and_grad, z)
    alone = loss_of(True, row, q, p, q, q) / 3
    torch.testing.assert_close(loss - alone, -logprobs(q, (2, END)).mean())


def test_no_gradient_goes_through_rewards_or_draws():
    """All that the loss reads of the student is its logits: the terms of a row carry no graph."""
    q, p, row = table(0).requires_grad_(), table(1), (1, END)
    loss = loss_of(True, row, q, p, q, q)
    (gradient,) = torch.autograd.grad(loss, q)
    assert gradient.abs().sum(1).nonzero()[:, 0].tolist() == [PREFIXES.index(()), PREFIXES.index((1,))]
