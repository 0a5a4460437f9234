"""The front door, coupling, laziness, and the edges where arithmetic could break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from attar.errors import NumericsError
from attar.runtime.completion import Completion
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import draw, noise_key, sample
from attar.runtime.sampling.warp import warp
from attar.runtime.speculate.chain import block
from attar.runtime.speculate.draft import Draft, DraftBuilder, Floats, Verdict
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.residual import excess, normal
from attar.runtime.speculate.target import TargetLogits
from attar.runtime.speculate.tree import walk
from attar.runtime.speculate.verify import verify

PROMPT = (3, 1)
TREE = (0, 0, 1, 1, 2)


@dataclass(frozen=True, eq=False)
class KnownRows:
    """A target whose distributions are known.

    Args:
        rows: p (n + 1, V), row i after node i.
    """

    rows: Floats
    draft: Draft
    noise: Noise

    @property
    def greedy(self) -> bool:
        """Whether every row is one-hot."""
        return bool((np.count_nonzero(self.rows, axis=-1) == 1).all())

    def token(self, node: int) -> int:
        """Plain decoding's token after the node."""
        return self.noise.token(self.draft.depths[node], self.rows[node])

    def p(self, node: int) -> Floats:
        """Its row."""
        row: Floats = self.rows[node]
        return row


@dataclass(frozen=True)
class Refuses(Noise):
    """Accepts nothing that has any chance to be refused."""

    def accepts(self, node: int, chance: float) -> bool:
        return chance >= 1


@dataclass(frozen=True)
class Stubborn(Noise):
    """Refuses also what is sure: as if rounding had gone wrong."""

    def accepts(self, node: int, chance: float) -> bool:
        return False


def trie(guesses: list[list[int]]) -> Draft:
    """Several fixed continuations as one tree; common beginnings share their nodes."""
    builder = DraftBuilder()
    for guess in guesses:
        builder.add(guess, [1] * len(guess))
    draft = builder.draft()
    assert draft is not None
    return replace(draft, kinds=None)


def text(**params: object) -> Completion:
    return Completion("r", 0, PROMPT, SamplingParams(**params), seed=5, limit=99)  # type: ignore[arg-type]


def noise(seed: int = 5, ahead: int = 0) -> Noise:
    return Noise(seed, 0, len(PROMPT) + ahead)


def random_rows(seed: int, count: int, V: int) -> Floats:
    generator = np.random.default_rng(seed)
    return generator.dirichlet(np.full(V, 0.5), count).astype(np.float32)


def language(prefix: tuple[int, ...]) -> torch.Tensor:
    """Logits (40,) behind a text."""
    return torch.from_numpy(np.random.default_rng([9, *prefix]).normal(size=40) * 2).float()


def passed(draft: Draft, context: tuple[int, ...] = ()) -> torch.Tensor:
    """What a pass over the draft returns: (n + 1, 40)."""
    paths = [draft.path_tokens(draft.path(node)) for node in range(len(draft) + 1)]
    return torch.stack([language((*context, *path)) for path in paths])


def plain(mine: Completion, count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens += sample(language(tuple(tokens))[None], [mine.row()], [mine.key()])
        mine.append(tokens[-1:])
    return tokens


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 6, "presence_penalty": 1.0},
    ],
)
@pytest.mark.parametrize("mode", ["coupled", "exact"])
def test_greedy_and_fixed_drafts_give_plain_decoding_s_completion(
    params: dict[str, float], mode: str
) -> None:
    """Guesses right, wrong and mixed, in trees: the tokens are those of plain decoding, in fewer passes."""
    wanted, mine, context, passes = plain(text(**params), 40), text(**params), (), 0
    generator = np.random.default_rng(3)
    while len(context) < 40:
        right = (wanted + [0] * 9)[len(context) : len(context) + 4]
        wrong = generator.integers(0, 40, 3).tolist()
        guesses = [right[: generator.integers(0, 5)] + wrong, [*wrong, 39], right[:2]]
        draft = trie(guesses)
        target = TargetLogits(passed(draft, context), mine, draft)
        actual_tokens = verify(draft, target, noise(ahead=len(context)), mode).tokens(draft)  # type: ignore[arg-type]
        context += tuple(mine.append(actual_tokens).token_ids)
        passes += 1
    assert list(context[:40]) == wanted and passes < 20


@pytest.mark.few(20)
@pytest.mark.parametrize("seed", range(60))
def test_a_coupled_completion_does_not_depend_on_the_draft(seed: int) -> None:
    """Any tree, any rule, any q: tokens are the draws of plain decoding; and the lazy rows are its rows."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(1, 9))
    parents = tuple(int(generator.integers(0, node + 1)) for node in range(n))
    p = random_rows(seed, 1, 6)[0]
    for rule in ("fixed", "iid", "distinct"):
        q = None if rule == "fixed" else random_rows(seed + 1, n, 6)
        draft = Draft(tuple(generator.integers(0, 6, n).tolist()), parents, q, rule)  # type: ignore[arg-type]
        actual_tokens = verify(
            draft, KnownRows(np.stack([p] * (n + 1)), draft, noise(seed)), noise(seed)
        ).tokens(draft)
        keys = [noise_key(seed, 0, 2 + depth) for depth in range(len(actual_tokens))]
        assert list(actual_tokens) == draw(torch.from_numpy(p).expand(len(actual_tokens), 6), keys)


def test_logits_are_warped_as_the_path_to_them_asks() -> None:
    mine = text(temperature=0.9, top_k=5, frequency_penalty=1.5, repetition_penalty=1.3)
    mine.append([7])
    draft = Draft((7, 8, 7, 9), (0, 0, 1, 3))
    target = TargetLogits(passed(draft), mine, draft)
    for node, path in enumerate([(), (7,), (8,), (7, 7), (7, 7, 9)]):
        row = mine.row(path)
        assert np.array_equal(target.p(node), warp(language(path)[None], [row])[0].numpy())
        assert target.token(node) == sample(language(path)[None], [row], [mine.key(len(path))])[0]
    assert not target.greedy and TargetLogits(passed(draft), text(temperature=0.0), draft).greedy


@dataclass
class Watched:
    """Known rows; remembers what was asked for."""

    rows: Floats
    asked: list[tuple[str, int]]
    greedy: bool = False

    def token(self, node: int) -> int:
        self.asked.append(("token", node))
        return int(self.rows[node].argmax())

    def p(self, node: int) -> Floats:
        self.asked.append(("p", node))
        return self.rows[node]


@pytest.mark.parametrize(
    ("draft", "mode", "greedy", "expected"),
    [
        (Draft((0, 1), (0, 1)), "coupled", False, "token"),
        (Draft((0, 1), (0, 0)), "exact", False, "token"),
        (Draft.chain((0, 1), np.full((2, 2), 0.5)), "coupled", False, "token"),
        (Draft.chain((0, 1), np.full((2, 2), 0.5)), "exact", True, "token"),
        (Draft.chain((0, 1), np.full((2, 2), 0.5)), "exact", False, "p"),
        (Draft((0, 1), (0, 0), np.full((2, 2), 0.5), "distinct"), "exact", False, "p"),
    ],
)
def test_the_door_picks_the_rule(draft: Draft, mode: str, greedy: bool, expected: str) -> None:
    target = Watched(np.full((3, 2), 0.5), [], greedy)
    verify(draft, target, noise(), mode)  # type: ignore[arg-type]
    assert {kind for kind, _ in target.asked} == {expected}


def test_a_chain_at_the_door_is_verified_as_a_block() -> None:
    p, q = np.tile([1 / 3, 2 / 3], (3, 1)), np.array([2 / 3, 1 / 3])
    draft, other = Draft.chain((0, 1), [q, q]), 0
    for seed in range(50):
        verdict = verify(draft, KnownRows(p, draft, noise(seed)), noise(seed), "exact")
        assert verdict == block(draft, p.__getitem__, noise(seed))
        other += verdict != walk(draft, p.__getitem__, noise(seed))
    assert other


def test_only_rows_on_the_walked_path_are_asked_for_and_each_once() -> None:
    draft = Draft((1, 0, 1, 0, 1), TREE, np.full((5, 2), 0.5), "distinct")
    rows = np.tile([1.0, 0.0], (6, 1))
    for mode in ("coupled", "exact"):
        target = Watched(rows, [])
        verdict = verify(draft, target, noise(), mode)  # type: ignore[arg-type]
        assert verdict.path == (2,) and [node for _, node in target.asked] == [0, 2]


def test_a_block_asks_for_nothing_behind_a_draft_that_the_target_cannot_draw() -> None:
    """A grammar may have no state there."""
    draft = Draft.chain((0, 1, 0, 0), np.full((4, 2), 0.5))
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [np.nan, np.nan], [np.nan] * 2, [np.nan] * 2])
    target = Watched(rows, [])
    assert verify(draft, target, noise(), "exact") == Verdict((1,), 0)
    assert [node for _, node in target.asked] == [0, 1]
    refused = Watched(np.array([[0.1, 0.9]] * 5), [])
    block(draft, refused.p, Stubborn(0, 0, 0))
    assert ("p", 4) not in refused.asked, "the row behind all drafts is for all accepted"


@pytest.mark.parametrize("judge", [block, walk])
@pytest.mark.parametrize("V", [5, 3000])
def test_equal_p_and_q_accept_everything(judge: Callable[..., Verdict], V: int) -> None:
    """Bit for bit equal, in float32, also if coins refuse whatever is not sure."""
    for seed in range(30):
        rows = random_rows(seed, 5, V)
        tokens = [draw(torch.from_numpy(row)[None], [seed])[0] for row in rows[:4]]
        draft = Draft.chain(tokens, rows[:4])
        assert judge(draft, rows.__getitem__, Refuses(seed, 0, 0)).path == (1, 2, 3, 4)


@pytest.mark.parametrize("rule", ["iid", "distinct"])
def test_equal_p_and_q_accept_the_first_child(rule: str) -> None:
    p = random_rows(1, 1, 6)[0]
    draft = Draft((2, 4, 1), (0, 0, 1), [p] * 3, rule)  # type: ignore[arg-type]
    assert walk(draft, lambda _: p, Refuses(0, 0, 0)).path == (1, 3)


@pytest.mark.parametrize("rule", ["iid", "distinct"])
def test_nothing_left_falls_back_to_p_without_the_refused(rule: str) -> None:
    """p = q but for rounding, and a refusal all the same."""
    p = np.array([0.5, 0.3, 0.2, 0.0], np.float32)
    q = np.array([0.5, 0.3, 0.2, 0.0], np.float32)
    draft = Draft((0, 2), (0, 0), [q, q], rule)  # type: ignore[arg-type]
    for seed in range(50):
        verdict = walk(draft, lambda _: p, Stubborn(seed, 0, 0))
        assert verdict.path == () and verdict.token in (1, 2)
        chain = block(Draft.chain((0, 1), [q, q]), lambda _: p, Stubborn(seed, 0, 0))
        assert chain.path == () and chain.token in (1, 2)


def test_nothing_left_at_all_falls_back_to_p() -> None:
    one = np.array([0.0, 1.0, 0.0], np.float32)
    for draft in (Draft.chain((1,), [one]), Draft((1, 1), (0, 0), [one, one], "iid")):
        assert walk(draft, lambda _: one, Stubborn(0, 0, 0)) == Verdict((), 1)
    assert block(Draft.chain((1, 1), [one, one]), lambda _: one, Stubborn(0, 0, 0)) == Verdict((), 1)
    assert normal(np.zeros(3), one, [1]) is one


def test_distinct_children_may_be_all_that_q_has() -> None:
    p, q = np.array([0.1, 0.1, 0.8]), np.array([0.5, 0.5, 0.0])
    draft = Draft((0, 1), (0, 0), [q, q], "distinct")
    for seed in range(50):
        verdict = walk(draft, lambda _: p, noise(seed))
        assert verdict in (Verdict((1,), verdict.token), Verdict((2,), verdict.token), Verdict((), 2))


def test_one_hot_rows() -> None:
    p, q = np.eye(4, dtype=np.float32)[2], np.eye(4, dtype=np.float32)[1]
    for judge in (block, walk):
        assert judge(Draft.chain((1, 1), [q, q]), lambda _: p, noise()) == Verdict((), 2)
        assert judge(Draft.chain((2, 2), [p, p]), lambda _: p, noise()) == Verdict((1, 2), 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("judge", [block, walk])
def test_vocabularies_of_different_sizes(judge: Callable[..., Verdict]) -> None:
    """Zeros after the shorter row; a token that the target lacks is rejected, in either case."""
    p, q = np.array([0.2, 0.3, 0.5], np.float32), np.array([0.6, 0.4], np.float32)
    padded = np.append(q, np.zeros(3, np.float32))
    for seed in range(200):
        results = [judge(Draft.chain((0, 1), [row, row]), lambda _: p, noise(seed)) for row in (q, padded)]
        assert results[0] == results[1] and results[0].token < 3
    foreign = np.array([0.0, 0.0, 0.0, 0.0, 1.0], np.float32)
    tokens = [
        judge(Draft.chain((4, 4), [foreign] * 2), lambda _: p, noise(seed)).token for seed in range(900)
    ]
    assert np.abs(np.bincount(tokens) / 900 - p).max() < 0.05
    assert excess(p, padded).tolist() == pytest.approx([0, 0, 0.5])


def test_a_child_with_no_q_was_not_drawn_and_changes_nothing() -> None:
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.0, 0.4, 0.6])
    padded = Draft((0, 1, 0), (0, 0, 0), [q] * 3, "iid")
    for seed in range(100):
        one = walk(Draft((1,), (0,), [q], "iid"), lambda _: p, Refuses(seed, 0, 0))
        assert walk(padded, lambda _: p, Refuses(seed, 0, 0)) == one


def test_inputs_are_not_modified() -> None:
    rows, q = random_rows(1, 6, 5), random_rows(2, 5, 5)
    before = rows.copy(), q.copy()
    for seed in range(40):
        for parents, rule in (((0, 1, 2, 3, 4), "iid"), (TREE, "iid"), (TREE, "distinct")):
            draft = Draft((0, 1, 2, 3, 4), parents, q, rule)  # type: ignore[arg-type]
            verify(draft, KnownRows(rows, draft, noise(seed)), noise(seed), "exact")
    assert np.array_equal(rows, before[0]) and np.array_equal(q, before[1])


def test_streams_are_apart() -> None:
    """A round's coins, drafts and last draw are not those of another round, nor of plain decoding."""
    mine = text()
    rounds = [noise(), noise(ahead=1)]
    keys = [item.drafting(depth) for item in rounds for depth in range(3)]
    keys += [noise_key(5, 0, 2 + ahead, purpose) for ahead in range(4) for purpose in range(3)]
    assert len(set(keys)) == len(keys)
    coins = [[item.accepts(1, chance) for chance in np.linspace(0, 1, 50)] for item in rounds]
    assert coins[0] != coins[1] and coins[0][-1] and not coins[0][0]
    weights = np.ones(1000)
    for depth in range(3):
        for purpose, actual in (
            (0, rounds[0].token(depth, weights)),
            (2, rounds[0].resample(depth, weights)),
        ):
            assert [actual] == draw(torch.ones(1, 1000), [noise_key(5, 0, 2 + depth, purpose)])
    drafting = DraftRules(mine, rounds[0])
    assert drafting.key(2) == rounds[0].drafting(2) and drafting.row((4,)).params is mine.params
    assert mine.key(1) == noise_key(5, 0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_greedy_walk_ignores_rows_off_its_path(dtype: torch.dtype) -> None:
    logits, draft = torch.zeros(4, 12, dtype=dtype)[:, :9], Draft((7, 3, 4), (0, 0, 2))
    logits[0, [3, 5]] = 2.0  # equals: the lower id
    logits[1] = torch.nan  # behind a draft that is not taken
    logits[2, 4] = logits[3, 8] = 1.0
    verdict = verify(draft, TargetLogits(logits, text(temperature=0.0), draft), noise())
    assert (verdict.path, verdict.tokens(draft)) == ((2, 3), (3, 4, 8))
    logits[3, 0] = torch.nan
    with pytest.raises(NumericsError):
        verify(draft, TargetLogits(logits, text(temperature=0.0), draft), noise())


def test_an_end_that_comes_too_early_is_not_the_likeliest() -> None:
    early = Completion(
        "r", 0, PROMPT, SamplingParams(temperature=0.0, min_tokens=2), seed=5, limit=99, ends=(3,)
    )
    logits, draft = torch.zeros(3, 9), Draft.chain((5, 5))
    logits[:, 3], logits[:, 5] = 2.0, 1.0
    verdict = verify(draft, TargetLogits(logits, early, draft), noise())
    assert verdict.tokens(draft) == (5, 5, 3)
