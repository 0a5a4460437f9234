"""The judgement of what a model writes: ``benchmarks/distill_generations.py``."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests import tiny_models

FILE = Path(__file__).parents[2] / "benchmarks/distill_generations.py"


@pytest.fixture(scope="module")
def generations():
    spec = importlib.util.spec_from_file_location("distill_generations", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_repetition_and_diversity_are_counted(generations):
    assert generations.repeated([1, 2, 3, 4, 5]) == 0.0 and generations.repeated([1, 2]) == 0.0
    assert generations.repeated([1, 2, 1, 2, 1, 2, 1]) == pytest.approx(0.5)  # 1212 2121 1212 2121
    assert generations.distinct([[1, 2, 3], [1, 2, 4]]) == pytest.approx(3 / 4)


def test_the_teachers_score_is_of_the_answers_alone(generations, tmp_path):
    model = tiny_models.build("llama3")
    folder = tiny_models.save(model, tmp_path / "model")
    prompts, answers = [[7, 8, 9], [20]], [[30, 31], [40, 41, 42]]
    total = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        log_p = tiny_models.logits(model, torch.tensor([prompt + answer]))[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        total += sum(float(log_p[s, token]) for s, token in zip(places, answer, strict=True))
    assert generations.teacher_score(folder, prompts, answers) == pytest.approx(total / 5, rel=1e-4)
