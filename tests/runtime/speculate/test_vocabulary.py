"""Two tokenizers: what both have is paired by bytes, texts are shown whole, drafts are target ids."""

from __future__ import annotations

import json
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from attar.errors import ModelError
from attar.runtime.completion import Completion
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.warp import likeliest
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.target import TargetLogits
from attar.runtime.speculate.verify import verify
from attar.runtime.speculate.vocabulary import SameVocabulary, SharedVocabulary, map_vocabularies
from tests import tiny_models

SOURCE = Path(textwrap.__file__).read_text(encoding="utf-8")
OTHER = 380
BEGIN = "<begin>"


def fast(tokenizer: Tokenizer, **special: str) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@lru_cache(maxsize=1)
def other() -> Any:
    """A byte-level BPE of other text and size, with other special tokens behind the words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    trainer = trainers.BpeTrainer(vocab_size=OTHER - 3, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([SOURCE[4000:12000]], trainer)
    return fast(tokenizer, eos_token="</s>", bos_token=BEGIN, mask_token="<mask>")


@lru_cache(maxsize=1)
def pieced() -> Any:
    """One of SentencePiece's kind, with fallback bytes, that puts a token before each text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>", *fallback], show_progress=False
    )
    tokenizer.train_from_iterator([SOURCE], trainer)
    state = json.loads(tokenizer.to_str())  # the bytes are words and not special
    state["added_tokens"] = state["added_tokens"][:2]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return fast(tokenizer, bos_token="<s>", eos_token="</s>")


TARGET = tiny_models.tokenizer()
V = tiny_models.VOCABULARY


def shared(draft: Any) -> SharedVocabulary:
    actual = map_vocabularies(draft, TARGET, (len(draft), V))
    assert isinstance(actual, SharedVocabulary)
    return actual


@pytest.mark.parametrize("draft", [other, pieced])
def test_pairs_stand_for_the_same_text(draft: Any) -> None:
    draft = draft()
    pairs = shared(draft).pairs
    assert len({one for one, _ in pairs}) == len({two for _, two in pairs}) == len(pairs) > 200
    words = 0
    for one, two in pairs:
        if one in draft.all_special_ids or two in TARGET.all_special_ids:
            continue
        ours, theirs = draft.decode([one, one]), TARGET.decode([two, two])
        if "\ufffd" not in ours + theirs:
            assert ours.lstrip() == theirs.lstrip()
            words += 1
    assert words > 90


def test_nothing_is_left_out_of_the_pairs() -> None:
    """Two byte-level tokenizers write the same bytes alike, so equal strings are all there is."""
    ours, theirs = other().get_vocab(), TARGET.get_vocab()
    equal = {(ours[token], theirs[token]) for token in ours if token in theirs}
    assert frozenset(shared(other()).pairs) == equal | {(other().eos_token_id, TARGET.eos_token_id)}


def test_special_tokens_by_role_and_by_name() -> None:
    draft = other()
    pairs = dict(shared(draft).pairs)
    assert pairs[draft.eos_token_id] == TARGET.eos_token_id
    assert pairs[draft.mask_token_id] == TARGET.mask_token_id
    assert draft.bos_token_id not in pairs, "the target's is its end token, which is taken"


@pytest.mark.parametrize("draft", [other, pieced])
def test_a_text_is_shown_whole_whatever_comes_when(draft: Any) -> None:
    draft = draft()
    tokens = TARGET.encode(SOURCE[4000:4700])
    translator = shared(draft).translator()
    for stop in (100, 101, 103, 104, 120, len(tokens)):
        actual = translator.translate(tokens[:stop])
        assert actual is not None
        text = draft.decode(actual, skip_special_tokens=True)
        assert text == TARGET.decode(tokens[:stop])
        actual.append(7)  # it is the caller's


def test_new_tokens_go_through_the_pairs_and_leave_what_was_there() -> None:
    vocabulary = shared(other())
    translator = vocabulary.translator()
    before = translator.translate(TARGET.encode("def wrap("))
    byte = TARGET.encode("x")
    after = translator.translate([*TARGET.encode("def wrap("), *byte])
    assert before is not None and after == [*before, *other().encode("x")]


def test_a_text_that_ends_inside_of_a_character_waits() -> None:
    tokens = TARGET.encode("a = '☃'")
    translator = shared(pieced()).translator()
    inside = next(stop for stop in range(len(tokens)) if "\ufffd" in TARGET.decode(tokens[:stop]))
    assert translator.translate(tokens[:inside]) is None
    actual = translator.translate(tokens)
    assert actual is not None and pieced().decode(actual, skip_special_tokens=True) == "a = '☃'"


def test_the_draft_s_own_beginning_comes_once() -> None:
    actual = shared(pieced()).translator().translate(TARGET.encode("class"))
    assert actual is not None and actual[0] == 0 and 0 not in actual[1:]
    with_end = [TARGET.eos_token_id, *TARGET.encode("class")]
    actual = shared(other()).translator().translate(with_end)
    assert actual == [other().eos_token_id, *other().encode("class")]


def test_logits_reach_the_target_s_ids() -> None:
    vocabulary = shared(other())
    rows = torch.randn(3, OTHER + 5)  # padded
    actual = vocabulary.target_logits(rows)
    assert actual.shape == (3, V)
    for one, two in vocabulary.pairs:
        assert torch.equal(actual[:, two], rows[:, one]) and vocabulary.draft_id(two) == one
    assert int(actual.isfinite().sum()) == 3 * len(vocabulary.pairs)


def test_one_tokenizer_needs_no_pairs() -> None:
    more = tiny_models.tokenizer()
    more.add_tokens(["<extra>", "<more>"])
    for draft, target in ((TARGET, TARGET), (more, TARGET), (TARGET, more), (None, TARGET), (TARGET, None)):
        assert isinstance(map_vocabularies(draft, target, (V + 8, V)), SameVocabulary)
    fewer = SameVocabulary(V, V + 2)
    assert fewer.translator().translate([5, V + 1]) == [5, V - 1]
    assert fewer.target_logits(torch.zeros(1, V)).tolist() == [[0.0] * V + [-torch.inf] * 2]


def test_refusals_name_both_models() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="tokenizer of small is neither"):
        map_vocabularies(fast(words), TARGET, (2, V), ("small", "large"))
    strange = Tokenizer(models.BPE({f"{chr(0x4E00 + i)}": i for i in range(300)}, []))
    strange.decoder = decoders.ByteLevel()
    with pytest.raises(ModelError, match="of small and large have 0 tokens in common, of 300 and 320"):
        map_vocabularies(fast(strange), TARGET, (300, V), ("small", "large"))


def small(vocabulary: int, seed: int) -> Any:
    return tiny_models.build("llama3", vocab_size=vocabulary, num_hidden_layers=1, hidden_size=32, seed=seed)


@lru_cache(maxsize=1)
def runner() -> Modules:
    return Modules(small(OTHER, 0), blocks=64, block_size=4)


def drafter() -> DraftModel:
    return DraftModel(runner(), shared(other()))


PROMPT = TARGET.encode("def wrap(text, width")


def test_q_is_the_draft_on_what_both_have() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    rules = DraftRules(Completion("r", 0, PROMPT, params, seed=3, limit=50), Noise(3, 0, len(PROMPT)))
    model, plain = drafter(), small(OTHER, 0)
    (draft,) = model.propose([DraftRequest(0, PROMPT, 4, rules=rules)])
    assert draft is not None and draft.q is not None
    draft.check()
    tokens = [*other().encode("def wrap(text, width")]
    for q, token in zip(draft.q, draft.tokens, strict=True):
        logits = tiny_models.logits(plain, torch.tensor([tokens]))[0, -1]
        wanted = (logits / 0.7)[[one for one, _ in shared(other()).pairs]].softmax(-1)
        kept = q[[two for _, two in shared(other()).pairs]]
        assert kept.sum() == pytest.approx(1, abs=1e-5) and len(q) == V
        inside = kept > 0
        mass = wanted.numpy() * inside
        assert mass.sum() >= 0.9 and np.allclose(kept, mass / mass.sum(), atol=1e-5)
        tokens.append(shared(other()).draft_id(token))
    model.forget(0)


def test_greedy_texts_are_the_target_s() -> None:
    """Rounds with a draft of another tokenizer, until 40 tokens are said."""
    target = small(V, 4)

    @torch.no_grad()
    def rows(tokens: list[int], count: int) -> torch.Tensor:
        return target(input_ids=torch.tensor([tokens])).logits[0, -count:]

    wanted = list(PROMPT)
    while len(wanted) < len(PROMPT) + 40:
        wanted += likeliest(rows(wanted, 1))
    model, tokens, drafted = drafter(), list(PROMPT), 0
    while len(tokens) < len(wanted):
        rules = Completion("r", 0, tokens, SamplingParams(temperature=0.0), seed=1, limit=99)
        (draft,) = model.propose([DraftRequest(0, tokens, 3, rules=rules)])
        model.check()
        if draft is None:
            tokens += likeliest(rows(tokens, 1))
            continue
        drafted += len(draft)
        logits = rows([*tokens, *draft.tokens], len(draft) + 1)
        verdict = verify(draft, TargetLogits(logits, rules, draft), Noise(1, 0, len(tokens)))
        tokens += verdict.tokens(draft)
    assert tokens[: len(wanted)] == wanted and drafted > 40
    model.forget(0)


def test_a_text_is_read_once() -> None:
    translator = shared(other()).translator()
    tokens = TARGET.encode("xyz")
    assert translator.translate(tokens) == translator.translate(tokens)
    between_them = SharedVocabulary(pieced(), other(), (len(pieced()), OTHER))
    actual = between_them.translator().translate([other().bos_token_id, *other().encode("class")])
    assert actual is not None and actual[0] == 0 and 0 not in actual[1:]


def test_what_is_paired() -> None:
    """Blanks; no column that the logits lack; and two ids that are swapped are seen."""
    for draft in (other(), pieced()):
        words = draft.convert_ids_to_tokens([one for one, _ in shared(draft).pairs])
        assert any(len(word) > 1 and word[0] in "▁Ġ" for word in words)
    assert all(one < 200 for one, _ in SharedVocabulary(other(), TARGET, (200, V)).pairs)
    state = json.loads(tiny_models.tokenizer_json())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    swapped = fast(Tokenizer.from_str(json.dumps(state)))
    assert isinstance(map_vocabularies(swapped, TARGET, (V, V)), SharedVocabulary)
