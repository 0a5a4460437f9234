"""What a draft model proposes is what plain decoding of it would say, whatever its tables went through."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from attar.runtime.completion import Completion
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import sample
from attar.runtime.sampling.warp import warp
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.draft_tables import common_prefix
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest, SamplingRules
from attar.runtime.speculate.target import TargetLogits
from attar.runtime.speculate.verify import VerificationMode, verify
from attar.runtime.speculate.vocabulary import SameVocabulary
from tests.runtime.fake_runner import VOCABULARY, FakeRunner, logits_after

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias={3: 1.0}
)


def text(tokens: list[int], params: SamplingParams, seed: int = 5) -> Completion:
    return Completion("r", 0, tokens, params, seed=seed, limit=1000)


def exact(tokens: list[int], params: SamplingParams = SAMPLED, seed: int = 5) -> DraftRules:
    return DraftRules(text(tokens, params, seed), Noise(seed, 0, len(tokens)))


def spoken(tokens: list[int], count: int, rules: SamplingRules) -> list[int]:
    """Plain decoding of the draft model, with the noise that the rules give."""
    actual: list[int] = []
    for ahead in range(count):
        logits = logits_after([*tokens, *actual])[None]
        actual += sample(logits, [rules.row(actual)], [rules.key(ahead)])
    return actual


def proposed(model: DraftModel, *wishes: DraftRequest) -> list[list[int]]:
    """Tokens of each draft; the model is checked."""
    drafts = model.propose(wishes)
    model.check()
    for draft in drafts:
        if draft is not None:
            draft.check()
    return [[] if draft is None else list(draft.tokens) for draft in drafts]


PROMPTS = [[7, 3, 9, 1, 4], [2] * 9, [11, 12, 13], list(range(20, 37))]


@pytest.mark.parametrize("kind", ["greedy", "exact", "coupled"])
@pytest.mark.parametrize("step_tokens", [2048, 7])
def test_a_batch_with_different_counts(kind: str, step_tokens: int) -> None:
    model = DraftModel(FakeRunner(), step_tokens=step_tokens)
    params = GREEDY if kind == "greedy" else SAMPLED
    rules = [exact(prompt) if kind == "exact" else text(prompt, params) for prompt in PROMPTS]
    wishes = [
        DraftRequest(i, prompt, most, rules=item)
        for i, (prompt, most, item) in enumerate(zip(PROMPTS, (3, 0, 1, 6), rules, strict=True))
    ]
    wanted = [spoken(list(wish.tokens), wish.most, rules[wish.sequence]) for wish in wishes]
    assert proposed(model, *wishes) == wanted


def test_passes_are_as_few_as_the_longest_draft() -> None:
    runner = FakeRunner()
    model = DraftModel(runner)
    proposed(model, DraftRequest(0, PROMPTS[0], 4), DraftRequest(1, PROMPTS[1], 2))
    assert [len(step.spans) for step in runner.steps] == [2, 2, 1, 1]
    assert len(runner.steps[0].tokens) == len(PROMPTS[0]) + len(PROMPTS[1])


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_rejected_drafts_are_taken_back_and_nothing_is_run_twice(accepted: int) -> None:
    runner = FakeRunner()
    model = DraftModel(runner)
    tokens = PROMPTS[0].copy()
    draft = proposed(model, DraftRequest(0, tokens, 4))[0]
    tokens += [*draft[:accepted], 49]
    runner.ran = 0
    assert proposed(model, DraftRequest(0, tokens, 4))[0] == spoken(tokens, 4, text(tokens, GREEDY))
    news = 2 if accepted == 4 else 1  # x_K was never run
    assert runner.ran == news + 3


def test_a_token_that_was_drafted_rejected_and_drawn_again() -> None:
    """The table has all of the text; its last token is run again for its logits."""
    model = DraftModel(FakeRunner())
    tokens = PROMPTS[0].copy()
    tokens += proposed(model, DraftRequest(0, tokens, 4))[0][:2]
    assert proposed(model, DraftRequest(0, tokens, 2))[0] == spoken(tokens, 2, text(tokens, GREEDY))


def test_q_is_the_warped_draft_and_goes_with_what_was_drawn_from_it() -> None:
    tokens = PROMPTS[0]
    rules = exact(tokens)
    (draft,) = DraftModel(FakeRunner()).propose([DraftRequest(0, tokens, 5, rules=rules)])
    assert draft is not None and draft.q is not None and draft.rule == "iid" and draft.is_chain
    draft.check()
    for depth in range(5):
        before = draft.tokens[:depth]
        q = warp(logits_after([*tokens, *before])[None], [rules.row(before)])[0]
        assert np.array_equal(draft.q[depth], q.numpy())


@pytest.mark.parametrize(
    "rules", [None, text(PROMPTS[0], GREEDY), exact(PROMPTS[0], GREEDY), text(PROMPTS[0], SAMPLED)]
)
def test_greedy_and_coupled_drafts_are_fixed(rules: SamplingRules | None) -> None:
    (draft,) = DraftModel(FakeRunner()).propose([DraftRequest(0, PROMPTS[0], 3, rules=rules)])
    assert draft is not None and draft.q is None and draft.rule == "fixed"


@pytest.mark.parametrize(("params", "mode"), [(GREEDY, "exact"), (SAMPLED, "exact"), (SAMPLED, "coupled")])
def test_the_target_as_its_own_draft_is_accepted_wholly(
    params: SamplingParams, mode: VerificationMode
) -> None:
    model = DraftModel(FakeRunner())
    for seed in range(10):
        tokens = [seed, *PROMPTS[0]]
        rules = text(tokens, params, seed)
        noise = Noise(seed, 0, len(tokens))
        shown = DraftRules(rules, noise) if mode == "exact" else rules
        (draft,) = model.propose([DraftRequest(seed, tokens, 4, rules=shown)])
        assert draft is not None
        verdict = verify(draft, target(tokens, draft, rules), noise, mode)
        assert verdict.path == (1, 2, 3, 4)
        if mode == "coupled" or params.greedy:
            assert list(verdict.tokens(draft)) == spoken(tokens, 5, rules)


def target(tokens: list[int], draft: Draft, rules: SamplingRules) -> TargetLogits:
    rows = [logits_after([*tokens, *draft.tokens[:depth]]) for depth in range(len(draft) + 1)]
    return TargetLogits(torch.stack(rows), rules, draft)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_texts_are_plain_decoding_s_behind_another_model(params: SamplingParams) -> None:
    """A target that mostly agrees with the draft: coupled, round by round, for 60 tokens."""

    def logits(tokens: list[int]) -> torch.Tensor:
        return logits_after(tokens) + 0.4 * logits_after([*tokens, 1])

    def plain(count: int) -> list[int]:
        actual: list[int] = []
        for _ in range(count):
            rules = text([*PROMPTS[0], *actual], params)
            actual += sample(logits([*PROMPTS[0], *actual])[None], [rules.row()], [rules.key()])
        return actual

    model, tokens, kept = DraftModel(FakeRunner()), PROMPTS[0].copy(), 0
    while len(tokens) < 65:
        rules = text(tokens, params)
        (draft,) = model.propose([DraftRequest(0, tokens, 3, rules=rules)])
        assert draft is not None
        rows = torch.stack([logits([*tokens, *draft.tokens[:depth]]) for depth in range(4)])
        verdict = verify(draft, TargetLogits(rows, rules, draft), Noise(5, 0, len(tokens)), "coupled")
        tokens += verdict.tokens(draft)
        kept += len(verdict.path)
    assert tokens[5:65] == plain(60) and 10 < kept < 60


def test_drafts_end_at_end_tokens_and_at_the_context() -> None:
    tokens = PROMPTS[0]
    wanted = spoken(tokens, 6, text(tokens, GREEDY))
    ended = DraftModel(FakeRunner(), ends=[wanted[2]])
    assert proposed(ended, DraftRequest(0, tokens, 6)) == [wanted[:3]]
    short = DraftModel(FakeRunner(context=7))
    assert proposed(short, DraftRequest(0, tokens, 6)) == [wanted[:3]], "x_3 behind tokens 0..6"
    assert proposed(short, DraftRequest(0, tokens + wanted[:2], 6)) == [wanted[2:3]]
    assert proposed(short, DraftRequest(0, tokens + wanted[:3], 6)) == [[]]
    assert short.tables.manager.sequences == []


def test_a_doubtful_row_gives_the_last_draft() -> None:
    """Its largest probability decides, which is there before anything is drawn."""
    lengths = []
    for seed in range(10):
        tokens = [seed, *PROMPTS[0]]
        for rules in (exact(tokens, seed=seed), text(tokens, GREEDY)):
            (draft,) = DraftModel(FakeRunner(), min_confidence=0.2).propose(
                [DraftRequest(0, tokens, 8, rules=rules)]
            )
            assert draft is not None
            for depth in range(len(draft)):
                logits = logits_after([*tokens, *draft.tokens[:depth]])[None]
                row = rules.row(draft.tokens[:depth])
                p = logits.softmax(-1) if row.params.greedy else warp(logits, [row])
                last = float(p.amax()) < 0.2 or depth == 7
                assert last == (depth == len(draft) - 1)
            lengths.append(len(draft))
    assert len(set(lengths)) > 1


def test_padded_logits() -> None:
    """Fewer and more columns than the target's: drafts are of the target's vocabulary, and so is q."""
    for columns in (VOCABULARY - 6, VOCABULARY + 6):
        model = DraftModel(FakeRunner(), SameVocabulary(VOCABULARY, columns))
        (draft,) = model.propose([DraftRequest(0, PROMPTS[0], 4, rules=exact(PROMPTS[0]))])
        assert draft is not None and draft.q is not None
        draft.check()
        assert all(len(row) == columns for row in draft.q) and max(draft.tokens) < min(columns, VOCABULARY)


def test_nan_ends_a_draft() -> None:
    runner = FakeRunner()
    wanted = spoken(PROMPTS[0], 3, text(PROMPTS[0], GREEDY))
    runner.poison = {wanted[1]}
    assert proposed(DraftModel(runner), DraftRequest(0, PROMPTS[0], 5)) == [wanted[:2]]


def test_a_runner_that_breaks_leaves_nothing_half_done() -> None:
    runner = FakeRunner()
    model = DraftModel(runner)
    proposed(model, DraftRequest(0, PROMPTS[0], 2), DraftRequest(1, PROMPTS[1], 2))
    runner.fails = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        model.propose([DraftRequest(0, PROMPTS[0], 2)])
    runner.fails = None
    model.check()
    assert model.tables.manager.sequences == [1]
    assert proposed(model, DraftRequest(0, PROMPTS[0], 2))[0] == spoken(
        PROMPTS[0], 2, text(PROMPTS[0], GREEDY)
    )


def test_a_pool_too_small_serves_the_first_ones_every_time() -> None:
    runner = FakeRunner(blocks=8, block_size=4)
    model = DraftModel(runner)
    texts = [[item] * 10 for item in range(1, 4)]  # 3 blocks each, and one more soon
    served = []
    for _ in range(6):
        drafts = proposed(model, *(DraftRequest(i, tokens, 2) for i, tokens in enumerate(texts)))
        for tokens, draft in zip(texts, drafts, strict=True):
            assert draft in ([], spoken(tokens, 2, text(tokens, GREEDY)))
            tokens.append(40)
        served.append([bool(draft) for draft in drafts])
    assert all(item[:2] == [True, True] and not item[2] for item in served), served
    runner.ran = 0
    assert proposed(model, DraftRequest(2, texts[2], 2))[0], "alone it has room: the others' tables go"
    assert runner.ran >= len(texts[2])


def test_prompts_that_begin_alike_are_run_once() -> None:
    runner = FakeRunner()
    model = DraftModel(runner)
    proposed(model, DraftRequest(0, PROMPTS[3], 1))
    runner.ran = 0
    proposed(model, DraftRequest(1, [*PROMPTS[3], 5], 1), DraftRequest(2, [*PROMPTS[3], 5], 1, salt="other"))
    assert runner.ran == 2 + len(PROMPTS[3]) + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [12, 64])
def test_random_rounds(seed: int, blocks: int) -> None:
    """Proposals, rejections and ends in any order: right or none, and nothing leaks."""
    dice = random.Random(seed)
    runner = FakeRunner(blocks=blocks, block_size=4, context=60)
    model = DraftModel(runner, step_tokens=dice.choice([9, 2048]))
    texts: dict[int, list[int]] = {}
    count = drafted = 0
    for _ in range(120):
        deed = dice.random()
        if deed < 0.15 or not texts:
            start = dice.choice([[], [9, 8, 7, 6, 5, 4, 3, 2]])
            texts[count] = start + [dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 20))]
            count += 1
        elif deed < 0.25:
            gone = dice.choice(list(texts))
            model.forget(gone)
            del texts[gone]
        else:
            some = dice.sample(list(texts), dice.randrange(1, len(texts) + 1))
            wishes = [
                DraftRequest(i, texts[i], dice.randrange(4), rules=dice.choice([exact, coupled])(texts[i]))
                for i in some
            ]
            for wish, draft in zip(wishes, proposed(model, *wishes), strict=True):
                tokens = texts[wish.sequence]
                assert draft == spoken(tokens, len(draft), wish.rules)  # type: ignore[arg-type]
                if blocks == 64 and len(texts) < 4:
                    assert len(draft) == max(min(wish.most, 61 - len(tokens)), 0)
                drafted += len(draft)
                tokens += [*draft[: dice.randrange(len(draft) + 1)], dice.randrange(VOCABULARY)]
        model.check()
        for sequence in [item for item, tokens in texts.items() if len(tokens) > 70]:
            model.forget(sequence)
            del texts[sequence]
    for sequence in texts:
        model.forget(sequence)
    model.check()
    manager = model.tables.manager
    assert drafted > 50 and manager.free + manager.cached == blocks


def coupled(tokens: list[int]) -> Completion:
    return text(tokens, SAMPLED)


def test_a_table_is_begun_only_where_those_before_it_can_grow() -> None:
    tables = DraftModel(FakeRunner(blocks=8, block_size=4)).tables
    tables.begin([0, 1])
    assert tables.open(0, [1] * 16, 0) and not tables.open(1, [2] * 16, 0)
    tables.begin([1])
    assert tables.open(1, [2] * 16, 0), "alone it may have all"
    tables.check()


def test_where_text_and_table_part() -> None:
    for index in (0, 5, 80, 99):
        other = [7] * 100
        other[index] = 8
        assert common_prefix([7] * 100, other) == common_prefix(other, [7] * 120) == index
    assert common_prefix([7] * 9, [7] * 4) == 4 and common_prefix([], [7]) == 0


def test_the_runner_forgets_tables_that_were_begun() -> None:
    forgotten: list[int] = []
    runner = FakeRunner()
    runner.forget = forgotten.append  # type: ignore[method-assign]
    model = DraftModel(runner)
    proposed(model, DraftRequest(0, PROMPTS[0], 2))
    for sequence in (0, 5):
        model.forget(sequence)
    assert forgotten == [0]


def test_a_long_prompt_does_not_hold_up_those_that_draft() -> None:
    runner = FakeRunner()
    model = DraftModel(runner, step_tokens=8)
    proposed(model, DraftRequest(1, PROMPTS[0], 1))
    runner.steps.clear()
    proposed(model, DraftRequest(0, PROMPTS[3], 1), DraftRequest(1, [*PROMPTS[0], 5], 1))
    assert [span.sequence for span in runner.steps[0].spans] == [1, 0]
