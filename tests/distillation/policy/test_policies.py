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
from attar.distillation.settings import MiniLLMSettings, PolicySettings
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
UNBIASED = {"clip_ratio": 0.0, "reward_clip": 0.0, "length_norm": False, "lm_weight": 0.0}


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


def loss_of(options, row, student, teacher, behaviour, writer, T=1.0, width=5):
    """The sum of the loss over a row's tokens."""
    with torch.no_grad():
        log_b, log_w, log_p = (logprobs(model, row, T) for model in (behaviour, writer, teacher))
    batch = batch_of(row, log_b, log_w, width)
    outputs = ModelOutputs(rows_of(teacher, row), None, batch.mask, batch.mask)
    target = OnlineTarget(outputs, OBJECTIVES["reverse-kl"], T)
    judged = torch.zeros(batch.tokens.shape, dtype=torch.float64).masked_scatter(batch.predicted, log_p)
    chunk_loss = policy_target(target, batch, judged, options).loss_and_grad
    return len(row) * mean_of_chunks(chunk_loss, rows_of(student, row))


def expected_gradient(options, student, teacher, behaviour=None, writer=None, T=1.0):
    """The mean gradient over all sequences that ``behaviour`` can draw."""
    student = student.clone().requires_grad_()
    behaviour, writer = (student.detach() if x is None else x for x in (behaviour, writer))
    total = 0.0
    for row in SEQUENCES:
        weight = logprobs(behaviour, row, T).sum().exp()
        total = total + weight * loss_of(options, row, student, teacher, behaviour, writer, T)
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


@pytest.mark.parametrize("T", [1.0, 2.0])
@pytest.mark.parametrize(
    "options",
    [
        PolicySettings(discount=1.0),
        MiniLLMSettings(**UNBIASED, teacher_mix=0.0, single_step=True),
        MiniLLMSettings(**UNBIASED, teacher_mix=0.0, single_step=False),
        MiniLLMSettings(**UNBIASED, teacher_mix=0.0, importance="none"),
        MiniLLMSettings(**UNBIASED, teacher_mix=0.0, importance="prefix"),
    ],
    ids=["policy-gradient", "minillm", "no-single-step", "no-importance", "prefix"],
)
def test_the_expected_gradient_is_that_of_the_kl_of_sequences(options, T):
    q, p = table(0), table(1)
    torch.testing.assert_close(expected_gradient(options, q, p, T=T), exact_gradient(q, p, T))


@pytest.mark.parametrize("single_step", [True, False])
def test_exact_weights_make_up_for_a_mixed_in_teacher(single_step):
    q, p = table(0), table(1)
    b, exact = mixture(p, q, 0.3), exact_gradient(q, p)
    errors = {}
    for importance in ("prefix", "token", "none"):
        options = MiniLLMSettings(**UNBIASED, importance=importance, single_step=single_step)
        errors[importance] = float((expected_gradient(options, q, p, b) - exact).norm() / exact.norm())
    assert errors["prefix"] < 1e-9 and errors["token"] > 0.01 and errors["none"] > 0.01, errors


def test_without_discounted_rewards_the_gradient_is_that_of_each_position():
    q, p = table(0), table(1)
    student = q.clone().requires_grad_()
    reached = {prefix: math.exp(float(logprobs(q, prefix).sum())) for prefix in PREFIXES}
    weight = torch.tensor([reached[prefix] for prefix in PREFIXES], dtype=torch.float64)
    log_q = student.log_softmax(-1)
    kl = (log_q.exp() * (log_q - p.log_softmax(-1))).sum(-1)
    wanted = torch.autograd.grad((weight * kl).sum(), student)[0]
    got = expected_gradient(PolicySettings(), q, p)
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
    torch.testing.assert_close(expected_gradient(PolicySettings(), q, p, old, old), wanted)


@pytest.mark.parametrize("options", [PolicySettings(discount=0.7), MiniLLMSettings(lm_weight=0.0)])
def test_padding_changes_nothing(options):
    q, p, row = table(0), table(1), (1, 2, END)
    losses = [loss_of(options, row, q, p, mixture(p, q, 0.2), q, width=width) for width in (4, 5, 9)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-12, atol=0.0)


def test_prompts_of_any_length_are_not_predicted():
    tokens = torch.tensor([[5, 6, 7, 8, 9, -100], [5, 6, 7, 8, 9, 4]])
    examples = completions(tokens, torch.tensor([1, 4]))
    assert examples.targets.tolist() == [[6, 7, 8, 9, -100, -100], [-100, -100, -100, 9, 4, -100]]


@pytest.mark.parametrize("D", [0.0, 0.5, 1.0])
def test_returns_are_discounted_by_their_distance(D):
    r = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 4.0, 0.0, 0.0]])
    wanted = [[sum(D ** (i - t) * row[i] for i in range(t, 4)) for t in range(4)] for row in r.tolist()]
    torch.testing.assert_close(returns(r, D), torch.tensor(wanted))
    torch.testing.assert_close(later(r), torch.tensor([[-2.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]))
    assert rewards(r, torch.zeros(2, 4), 2.5).abs().max() == 2.5


def slow_terms(log_p, behaviour, policy, drawn, o):
    """The definition, a token at a time."""
    advantage = torch.zeros_like(log_p)
    step = torch.zeros_like(log_p)
    for b in range(len(log_p)):
        places = [t for t in range(log_p.shape[1]) if drawn[b, t]]
        for t in places:
            future = [i for i in places if (i > t if o.single_step else i >= t)]
            total = 0.0
            for i in future:
                r = float((log_p[b, i] - policy[b, i]).clamp(-o.reward_clip, o.reward_clip))
                product = math.exp(sum(float(policy[b, j] - behaviour[b, j]) for j in places if j <= i))
                total += o.discount ** (i - t) * r * (product if o.importance == "prefix" else 1.0)
            advantage[b, t] = total / max(len(future), 1) if o.length_norm else total
            product = math.exp(sum(float(policy[b, j] - behaviour[b, j]) for j in places if j < t))
            step[b, t] = o.single_step * (product if o.importance == "prefix" else 1.0)
    return advantage, step


@pytest.mark.parametrize("changes", [{}, {"single_step": False}, {"importance": "prefix", "discount": 0.5}])
@pytest.mark.parametrize("length_norm", [True, False])
def test_terms_are_those_of_the_definition(changes, length_norm):
    g = torch.Generator().manual_seed(0)
    drawn = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
    known = [-(torch.rand(3, 5, generator=g, dtype=torch.float64) * 3) * drawn for _ in range(3)]
    o = MiniLLMSettings(**{"reward_clip": 1.0, "length_norm": length_norm, **changes})
    options = {
        name: getattr(o, name)
        for name in ("single_step", "importance", "length_norm", "discount", "reward_clip", "whiten")
    }
    got = minillm.terms(*known, drawn, **options)
    advantage, step = slow_terms(*known, drawn, o)
    torch.testing.assert_close(got.advantage, advantage)
    torch.testing.assert_close(got.step, step)
    assert torch.equal(got.anchor, known[1] if o.importance == "token" else known[2])
    white = minillm.terms(*known, drawn, **{**options, "whiten": True}).advantage
    values = advantage[drawn]
    wanted = (values - values.mean()) / values.std(unbiased=False)
    torch.testing.assert_close(white[drawn], wanted, rtol=1e-5, atol=1e-6)
    assert not white[~drawn].any()


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
    """The mean over drawn tokens, and lm_weight times the mean over read ones."""
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
    losses = [
        mean_of_chunks(
            policy_target(target, batch, judged, MiniLLMSettings(lm_weight=weight)).loss_and_grad, z
        )
        for weight in (0.0, 0.5)
    ]
    alone = loss_of(MiniLLMSettings(lm_weight=0.0), row, q, p, q, q) / 3
    torch.testing.assert_close(losses[0], alone)
    torch.testing.assert_close(losses[1] - losses[0], -0.5 * logprobs(q, (2, END)).mean())


def test_no_gradient_goes_through_rewards_or_draws():
    """All that the loss reads of the student is its logits: the terms of a row carry no graph."""
    q, p, row = table(0).requires_grad_(), table(1), (1, END)
    loss = loss_of(MiniLLMSettings(lm_weight=0.0), row, q, p, q, q)
    (gradient,) = torch.autograd.grad(loss, q)
    assert gradient.abs().sum(1).nonzero()[:, 0].tolist() == [PREFIXES.index(()), PREFIXES.index((1,))]
