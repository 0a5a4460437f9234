"""What a model's lineage has read: found in an evaluation's text under any name, and nowhere else."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from attar.checkpoint import open_checkpoint
from attar.checkpoint.lineage import TEXTS, texts_of
from attar.data import seen
from attar.measure.evaluate import evaluate
from attar.measure.settings import EvaluateSettings
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from attar.recipe.run import run_recipe
from attar.recipe.schema import parse_recipe
from tests import tiny_models
from tests.data.test_splits import prose
from tests.log_lines import LogLines

EVALUATION = {"tokens": 32_768, "sequence_length": 64, "speed": False, "sample": ""}


def hashes(*words):
    return seen.hashes(list(words))


def test_a_record_of_a_short_text_is_exact():
    first, second = ([f"{name}{n}" for n in range(400)] for name in "ab")
    kept = seen.sketch(hashes(*first))
    assert seen.contained(np.unique(hashes(*first)), kept) == 1.0
    assert seen.contained(np.unique(hashes(*second)), kept) == 0.0
    half = np.unique(np.concatenate([hashes(*first), hashes(*second)]))
    assert seen.contained(half, kept) == 0.5
    assert seen.contained(half, "no base 64!") == 0.0 == seen.contained(half, "")


@pytest.mark.few(1)
@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_a_record_of_a_long_text_estimates(share):
    noise = random.Random(3)
    read = [str(noise.getrandbits(40)) for _ in range(100_000)]
    fresh = [str(noise.getrandbits(40)) for _ in range(20_000)]
    count = int(share * 20_000)
    evaluated = np.unique(hashes(*read[50_000 : 50_000 + count], *fresh[count:]))
    assert seen.contained(evaluated, seen.sketch(hashes(*read))) == pytest.approx(share, rel=0.4)


def test_bits_of_the_hash_do_not_depend_on_each_other():
    values = hashes(*[str(n % 7) for n in range(2_000)], *[str(n) for n in range(20_000)])
    bits = (np.unique(values)[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.02


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A model that was pruned with one text, and that text."""
    folder = tmp_path_factory.mktemp("seen")
    model = tiny_models.save(tiny_models.build("smollm"), folder / "model")
    (folder / "read.txt").write_text(prose(40, seed=1))
    settings = prune_settings(
        method="heads", ratio=0.25, samples=64, sequence_length=64, data=f"{folder}/read.txt"
    )
    return prune(model, folder / "pruned", settings), (folder / "read.txt").read_text(), folder


def note(model, data):
    messages = LogLines()
    messages.task = seen_task
    measurements = evaluate(model, EvaluateSettings(data=str(data), **EVALUATION), progress=messages)
    assert (
        measurements.held_out
        == (not measurements.held_out_note)
        == (not any("warning" in line for line in messages.lines))
    )
    return measurements.held_out_note


def seen_task(*_, **__):
    from contextlib import nullcontext

    return nullcontext(SimpleNamespace(advance=lambda *_, **__: None))


def test_the_text_of_a_stage_is_in_its_card_and_next_to_it(pruned):
    model, _, folder = pruned
    (record,) = model.card.details["text"]
    assert record["split"] == "calibration" and record["held_out"] and "sketch" not in record
    assert record["data"] == f"{folder}/read.txt" and 500 < record["tokens"] <= 64 * 64
    assert (model.path / TEXTS).stat().st_size < 25_000 and TEXTS in model.card.files
    assert [item["stage"] for item in texts_of(model)] == ["prune"]


def test_the_other_split_of_the_same_file_was_not_read(pruned):
    model, _, folder = pruned
    assert note(model.path, folder / "read.txt") == ""


@pytest.mark.slow
def test_the_same_text_under_another_name_was(pruned, tmp_path):
    model, text, _ = pruned
    (tmp_path / "other-name.txt").write_text(text)
    assert note(model.path, tmp_path / "other-name.txt") == "", "its split is the same"
    assert "of the evaluation text was read by prune" in note(model.path, f"whole:{tmp_path}/other-name.txt")


@pytest.mark.slow
def test_one_shared_document_among_many_is_seen(pruned, tmp_path):
    model, text, _ = pruned
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(prose(6, seed=100 + number))
    shared = text[int(len(text) * 0.8) : int(len(text) * 0.9)]  # what calibration read
    (tmp_path / "shared.txt").write_text(shared)
    message = note(model.path, f"whole:{tmp_path}")
    assert "of the evaluation text was read by prune" in message and "all" not in message


@pytest.mark.slow
def test_another_text_gives_no_warning(pruned, tmp_path):
    (tmp_path / "fresh.txt").write_text(prose(60, seed=2))
    assert note(pruned[0].path, f"whole:{tmp_path}/fresh.txt") == ""


def test_what_cannot_be_held_out_is_reported_everywhere(tmp_path, capsys):
    from attar.cli.main import call

    model = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    (tmp_path / "short.txt").write_text("a few words\n" * 40)
    options = ["--data", f"{tmp_path}/short.txt", "--sequence-length", "32"]
    assert call(["prune", str(model), "-o", f"{tmp_path}/out", "--samples", "4", *options]) == 0
    assert "nothing of it can be held out: 480 characters cannot be cut" in capsys.readouterr().err
    card = open_checkpoint(tmp_path / "out").card
    assert (
        card.details["text"][0]["held_out"] is False and "cannot be cut" in card.details["text"][0]["reason"]
    )
    assert (
        call(["evaluate", f"{tmp_path}/out", *options, "--no-speed", "--sample", "", "--tokens", "64"]) == 0
    )
    shown = capsys.readouterr()
    assert "NOT held out" in shown.out and "nothing of the text can be held out" in shown.err


RECIPE = """
model: {model}
data: {folder}/read.txt
evaluate:
  {{data: "whole:{folder}/evaluated.txt", tokens: 2048, sequence_length: 64, speed: false, sample: ""}}
stages:
  - {{stage: prune, method: heads, ratio: 0.25, samples: 2, sequence_length: 64}}
  - stage: recover
    data: whole:{folder}/other.txt
    steps: 4
    sequence_length: 64
    precision: fp32
"""


@pytest.mark.slow
def test_a_recipe_that_evaluates_on_what_it_recovered_on(tmp_path):
    """The evaluated file holds the recovery's text: the recovered model is marked, the pruned one is not."""
    model = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    (tmp_path / "read.txt").write_text(prose(60, seed=1))
    (tmp_path / "other.txt").write_text(prose(8, seed=2))
    (tmp_path / "evaluated.txt").write_text(prose(8, seed=2))
    result = run_recipe(parse_recipe(RECIPE.format(model=model, folder=tmp_path)), tmp_path / "run")
    held = [stage["measurements"]["held_out"] for stage in result.content["stages"]]
    assert held == [True, True, False]
    message = "recover is not measured on held-out text: all of the evaluation text was read by recover"
    assert message in result.table() and message in (tmp_path / "run" / "report.html").read_text()
    lineage = json.loads((tmp_path / "run" / "02-recover" / TEXTS).read_text())["texts"]
    assert [(item["stage"], item["split"]) for item in lineage][:2] == [
        ("prune", "calibration"),
        ("recover", "train"),
    ]
