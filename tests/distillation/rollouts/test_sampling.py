"""Rows drawn by the runtime from a model in memory."""

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.adapters import add_adapters
from attar.distillation.rollouts.sampling import prompt_lengths, sample_rows
from attar.distillation.rollouts.student import StudentWriter
from attar.distillation.stage import linears_of
from attar.errors import NumericsError
from attar.kernels.structures import library
from attar.runtime.runner.blended import BlendedRunner
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.from_model import runner_of, shared_copy
from attar.runtime.runner.modules import Modules
from tests import tiny_models

PROMPTS = [[7, 8, 9], [20], [30, 31, 32, 33, 34]]
V = tiny_models.VOCABULARY


def rows_of(model, *, seed=0, prompts=PROMPTS, length=12, ends=(), temperature=1.0, exact=True, tokens=0):
    runner = runner_of(model, sequences=len(prompts), length=length, exact=exact)
    options = {"vocabulary": V, "ends": ends, "seed": seed, "temperature": temperature, "tokens": tokens}
    return sample_rows(runner, prompts, length, **options)


def own_logprobs(model, rows, T=1.0):
    """Of every token but the first, in one whole pass."""
    z = tiny_models.logits(model, rows.clamp(min=0))[:, :-1, :V] / T
    return z.log_softmax(-1).gather(-1, rows[:, 1:].clamp(min=0)[..., None])[..., 0]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("T", [1.0, 2.0])
def test_rows_follow_their_prompts_and_know_their_probabilities(family, T):
    model = tiny_models.build(family)
    rows, logprobs = rows_of(model, temperature=T)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        assert row[: len(prompt)].tolist() == prompt and (row != PADDING).all()
    drawn = torch.tensor([[s >= len(prompt) for s in range(1, 12)] for prompt in PROMPTS])
    torch.testing.assert_close(
        logprobs[:, 1:][drawn], own_logprobs(model, rows, T)[drawn], rtol=1e-4, atol=1e-4
    )
    assert not logprobs[:, 1:][~drawn].any()


def test_an_end_token_belongs_to_the_row_and_what_follows_is_padding():
    model = tiny_models.build("gpt2")
    free, _ = rows_of(model)
    end = int(free[0, 6])
    rows, logprobs = rows_of(model, ends=(end,))
    assert rows[0, 6] == end and (rows[0, 7:] == PADDING).all() and logprobs[0, 6] < 0.0
    assert not logprobs[0, 7:].any()
    short, _ = rows_of(model, tokens=2)
    assert (short != PADDING).sum(1).tolist() == [len(prompt) + 2 for prompt in PROMPTS]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_rows_alone_or_together():
    model = tiny_models.build("llama3")
    rows, logprobs = rows_of(model)
    again, same = rows_of(model)
    assert torch.equal(rows, again) and torch.equal(logprobs, same)
    assert torch.equal(rows_of(model, prompts=PROMPTS[1:2], seed=1)[0], rows[1:2])
    assert not torch.equal(rows_of(model, seed=7)[0], rows)


def test_the_model_that_is_trained_stays_as_it_is():
    model = tiny_models.build("gpt2").train()
    before, state = model.config._attn_implementation, torch.get_rng_state()
    StudentWriter(V, (0,), prompt_tokens=2).write(model, Examples.of_text(tiny_models.tokens(model)), 0)
    assert model.training and model.config._attn_implementation == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_shared_copy_has_the_models_weights_after_a_step():
    model = tiny_models.build("gpt2")
    twin = shared_copy(model)
    assert twin is not model and twin.config is not model.config
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    rows = tiny_models.tokens(model)
    assert torch.equal(tiny_models.logits(model, rows), tiny_models.logits(twin, rows))


@pytest.mark.skipif(library() is None, reason="no compiler")
def test_weights_are_rounded_only_where_that_is_allowed():
    model = tiny_models.build("llama3")
    assert isinstance(runner_of(model, sequences=1, length=8), Compiled)
    assert isinstance(runner_of(model, sequences=1, length=8, exact=True), Modules)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    assert isinstance(runner_of(model, sequences=1, length=8, exact=True), Compiled)
    rows, logprobs = rows_of(model)
    drawn = torch.tensor([[s >= len(prompt) for s in range(1, 12)] for prompt in PROMPTS])
    torch.testing.assert_close(logprobs[:, 1:][drawn], own_logprobs(model, rows)[drawn], rtol=0.02, atol=0.02)


def test_new_weights_write_other_rows():
    """A runner is made of the weights of the moment, tied and rounded or not."""
    model = tiny_models.build("smollm")
    before, _ = rows_of(model, exact=False)
    tiny_models.randomize(model, seed=5)
    after, logprobs = rows_of(model, exact=False)
    assert not torch.equal(before, after)
    drawn = torch.tensor([[s >= len(prompt) for s in range(1, 12)] for prompt in PROMPTS])
    torch.testing.assert_close(logprobs[:, 1:][drawn], own_logprobs(model, after)[drawn], rtol=0.1, atol=0.1)


def test_a_broken_model_is_named():
    model = tiny_models.build("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight.fill_(torch.nan)
    with pytest.raises(NumericsError):
        rows_of(model)


@pytest.mark.slow
def test_a_mixture_draws_from_both_models():
    """Its log-probabilities are those of a p + (1 - a) q, token by token; draws follow them."""
    student, teacher, a, T = tiny_models.build("gpt2"), tiny_models.build("llama3", seed=3), 0.6, 1.5
    prompts = [[7, 8, 9]] * 400
    runners = [runner_of(model, sequences=64, length=5, exact=True) for model in (student, teacher)]
    mixed = BlendedRunner(runners, [1 - a, a], vocabulary=40, temperature=T)
    rows, logprobs = sample_rows(mixed, prompts, 5, vocabulary=40, ends=(), seed=0)
    q, p = ((tiny_models.logits(model, rows)[..., :40] / T).softmax(-1) for model in (student, teacher))
    law = a * p + (1 - a) * q
    wanted = law[:, :-1].gather(-1, rows[:, 1:, None])[..., 0].log()
    torch.testing.assert_close(logprobs[:, 3:], wanted[:, 2:], rtol=1e-4, atol=1e-4)
    counts = rows[:, 3].bincount(minlength=40).double() / len(rows)
    assert 0.5 * (counts - law[0, 2].double()).abs().sum() < 0.17  # of 400 draws
    assert 0.5 * (counts - q[0, 2].double()).abs().sum() > 0.2


def test_the_students_rows_know_both_laws():
    student, teacher = tiny_models.build("gpt2"), tiny_models.build("llama3", seed=3)
    text = Examples.of_text(tiny_models.tokens(student, batch=3, length=10))
    mixed = StudentWriter(V, (), temperature=1.5, prompt_tokens=4, mix=0.4, teacher=teacher)
    rows = mixed.write(student, text, 3)
    assert torch.equal(rows.tokens[:, :4], text.tokens[:, :4]) and rows.count() == 3 * 6
    assert (rows.targets[:, :3] == PADDING).all() and torch.equal(rows.targets[:, 3:-1], rows.tokens[:, 4:])
    q, p = (own_logprobs(model, rows.tokens, 1.5).exp() for model in (student, teacher))
    drawn = rows.predicted[:, :-1]
    torch.testing.assert_close(rows.policy[:, :-1][drawn], q.log()[drawn], rtol=1e-4, atol=1e-4)
    law = (0.4 * p + 0.6 * q).log()
    torch.testing.assert_close(rows.behaviour[:, :-1][drawn], law[drawn], rtol=0.05, atol=0.05)
    alone = StudentWriter(V, (), prompt_tokens=4).write(student, text, 3)
    assert torch.equal(alone.behaviour, alone.policy)


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_a_student_with_adapters_writes_by_them(family):
    """The rows' probabilities are those of the weights with the adapters, not of the frozen ones."""
    pytest.importorskip("peft")
    model = tiny_models.build(family)
    student = add_adapters(model, linears_of(model), 4)
    with torch.no_grad():
        for name, value in student.named_parameters():
            if "lora_B" in name:
                value.copy_(torch.linspace(-1, 1, value.numel()).view_as(value))
    text = Examples.of_text(tiny_models.tokens(model, batch=3, length=10))
    rows = StudentWriter(V, (), prompt_tokens=4).write(student, text, 3)
    drawn = rows.predicted[:, :-1]
    wanted = own_logprobs(student, rows.tokens)[drawn]
    torch.testing.assert_close(rows.behaviour[:, :-1][drawn], wanted, rtol=1e-4, atol=1e-4)
    with student.disable_adapter():
        assert (own_logprobs(student, rows.tokens)[drawn] - wanted).abs().max() > 0.1


def test_what_is_not_predicted_in_front_is_the_prompt():
    text = Examples.of_text(torch.tensor([[5, 6, 7, 8, 9], [5, 6, PADDING, PADDING, PADDING]]))
    assert prompt_lengths(text, 3).tolist() == [3, 1]
    targets = torch.tensor([[PADDING, PADDING, PADDING, 9, PADDING], [PADDING, 7, PADDING, PADDING, PADDING]])
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, PADDING, PADDING]])
    assert prompt_lengths(Examples(tokens, targets), 1).tolist() == [4, 2]
