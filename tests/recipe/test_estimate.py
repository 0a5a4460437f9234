"""Shapes from headers, and estimates of the right size."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.recipe.estimate import estimate
from attar.recipe.schema import StageEntry, parse_recipe
from attar.recipe.shape import Shape, after, shape_of
from tests.recipe.recipe_fakes import make_model

SHAPE = Shape(attention=400e3, mlp=600e3, outside=200e3, layers=4, hidden=128, vocabulary=1000, bytes=2.4e6)


def entry(stage: str) -> StageEntry:
    """A stage as a recipe writes it."""
    return parse_recipe(f"{{model: a, stages: [{{{stage}}}]}}").stages[0]


def test_the_shape_of_a_checkpoint(tmp_path: Path) -> None:
    shape = shape_of(open_checkpoint(make_model(tmp_path / "m")))
    assert shape == Shape(
        attention=128, mlp=128, outside=256, layers=2, hidden=8, vocabulary=32, bytes=512 * 4
    )
    assert shape.parameters == 512


@pytest.mark.parametrize(
    ("stage", "parameters", "nbytes"),
    [
        ("stage: distill, layers: 1", 450e3, 0.9e6),
        ("stage: distill", 700e3, 1.4e6),
        ("stage: prune, method: heads, ratio: 0.5", 1e6, 2e6),
        ("stage: prune, method: neurons, ratio: 0.5", 900e3, 1.8e6),
        ("stage: recover", 1.2e6, 2.4e6),
        ("stage: quantize, scheme: W4A16, group_size: 32", 1.2e6, 0.5625e6 + 0.4e6),
        ("stage: quantize, scheme: W4A16, group_size: 0", 1.2e6, 0.515625e6 + 0.4e6),
        ("stage: quantize, scheme: W4A16, group_size: -1", 1.2e6, 0.53125e6 + 0.4e6),
        ("stage: quantize, scheme: W8A16, group_size: 32", 1.2e6, 1.0625e6 + 0.4e6),
        ("stage: quantize, scheme: W4A16, group_size: 32, embedding_bits: 8", 1.2e6, 0.5625e6 + 0.2e6),
        ("stage: export, format: dense, dtype: float32", 1.2e6, 4.8e6),
    ],
)
def test_what_a_stage_makes(stage: str, parameters: float, nbytes: float) -> None:
    made = after(entry(stage), SHAPE)
    assert made.parameters == pytest.approx(parameters)
    assert made.bytes == pytest.approx(nbytes)


def test_training_costs_what_the_formula_says() -> None:
    step = entry("stage: distill, layers: 4, steps: 10, batch_size: 2, accumulate: 3, sequence_length: 100")
    needs = estimate(step, SHAPE, SHAPE, SHAPE, rate=1e9)
    assert needs.work == pytest.approx(10 * 2 * 3 * 100 * 8 * 1.2e6)
    assert needs.seconds == pytest.approx(needs.work / 1e9, abs=3)
    assert needs.scratch_bytes == pytest.approx(12 * 1.2e6)
    assert needs.memory_bytes > 20 * 1.2e6


def test_rounding_is_cheap_and_gptq_is_not() -> None:
    rtn = estimate(entry("stage: quantize, method: rtn"), SHAPE, None, SHAPE, rate=1e9)
    gptq = estimate(entry("stage: quantize, method: gptq"), SHAPE, None, SHAPE, rate=1e9)
    assert rtn.work == 0 and gptq.work > 4 * 1e6 * 128 * 512
    assert gptq.seconds > rtn.seconds
