"""CMA-ES over a merge's coefficients: the space that a configuration spans, the search, its resumption."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.errors import MissingExtraError, NumericsError, SettingsError, UsageError
from attar.merging.config.documents import parse_configs
from attar.merging.config.dump import config_text
from attar.merging.quality import HeldOutText
from attar.merging.search.coefficients import SearchSpace, search
from attar.merging.search.loss_cache import LossCache
from tests import tiny_models

TIES = """
merge_method: ties
base_model: org/base
parameters: {normalize: true, lambda: 1}
models:
  - {model: org/one, parameters: {weight: 0.5, density: [0.2, 0.6]}}
  - model: org/two+org/adapter
    parameters:
      weight:
        - {filter: mlp, value: [0.1, 0.9]}
        - {value: 2.5}
dtype: float32
"""
SLERP = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\nparameters: {t: 0.1}\n"
PAIR = """
merge_method: linear
models:
  - {model: one, parameters: {weight: 1.0}}
  - {model: two, parameters: {weight: 0.0}}
parameters: {normalize: false}
"""


def space_of(text: str) -> SearchSpace:
    return SearchSpace.of(parse_configs(text)[0])


def test_every_written_number_is_a_coordinate():
    results = [(coordinate.label, coordinate.start) for coordinate in space_of(TIES).coordinates]
    assert results == [
        ("lambda", 1.0),
        ("org/one weight", 0.5),
        ("org/one density, point 1", 0.2),
        ("org/one density, point 2", 0.6),
        ("org/two+org/adapter weight, mlp, point 1", 0.1),
        ("org/two+org/adapter weight, mlp, point 2", 0.9),
        ("org/two+org/adapter weight, others", 2.5),
    ]
    for coordinate in space_of(TIES).coordinates:
        assert coordinate.low <= coordinate.start <= coordinate.high and coordinate.low < coordinate.high
    density = space_of(TIES).coordinates[2]
    assert density.low > 0 and density.high == 1.0
    assert space_of(TIES).coordinates[-1].high == 2.5, "a start outside the span widens it"


def test_parameters_go_back_where_they_came_from():
    space = space_of(TIES)
    assert space.config_with(space.start) == space.config
    values = tuple(round(0.11 * (number + 1), 4) for number in range(7))
    changed = space.config_with(values)
    assert SearchSpace.of(changed).start == values
    assert space.config == parse_configs(TIES)[0], "the configuration is not touched"
    one, two = changed.modules[0].slices[0].sources
    assert one.parameters["weight"].value == 0.22 and one.parameters["density"].value == (0.33, 0.44)
    assert [entry.value for entry in two.parameters["weight"].value] == [(0.55, 0.66), 0.77]
    assert changed.parameters["lambda"].value == 0.11 and changed.parameters["normalize"].value is True


@pytest.mark.parametrize(
    "text",
    [
        TIES,
        SLERP,
        PAIR,
        """
merge_method: passthrough
name: stacked
slices:
  - {sources: [{model: "a@main", layer_range: [0, 4]}]}
  - sources:
      - model: b
        layer_range: [2, 6]
        parameters: {scale: [{filter: o_proj, value: 0.0}, {value: 1.0}]}
dtype: bfloat16
""",
        """
merge_method: linear
modules:
  decoder:
    parameters: {normalize: false}
    slices:
      - base_model: c
        parameters: {weight: 0.25}
        sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]
  encoder: {models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1e-05}}]}
out_dtype: float16
chat_template: "{% for m in messages %}\\n{{ m }}{% endfor %}"
tokenizer:
  source: union
  pad_to_multiple_of: 64
  tokens:
    "<a>": {source: b, force: true}
    "no": {source: {kind: zero}}
    "1e5": {source: {kind: model_token, model: a, token: "1e5"}}
    "c": {source: {kind: model_token, model: a, token_id: 7}}
""",
        "merge_method: greedy_soup\nmodels: [{model: '1'}, {model: 'true'}]\ntokenizer_source: base\n",
    ],
)
def test_text_reads_back_as_the_same_configuration(text):
    (config,) = parse_configs(text)
    assert parse_configs(config_text(config)) == (config,)


def bowl(values):
    """Lowest, 1.0, at (0.3, 0.7)."""
    return 1.0 + (values[0] - 0.3) ** 2 + 3 * (values[1] - 0.7) ** 2


def test_finds_the_bottom_of_a_bowl():
    result = search(space_of(PAIR), bowl, budget=120, seed=3)
    assert result.best.values == pytest.approx((0.3, 0.7), abs=0.03)
    assert result.history[0].values == (1.0, 0.0) and len(result.history) == 120
    assert result.best.loss == min(candidate.loss for candidate in result.history)
    assert all(result.best.loss <= bowl(candidate.values) for candidate in result.history)


def test_one_coordinate_is_enough():
    result = search(space_of(SLERP), lambda values: (values[0] - 0.62) ** 2, budget=40)
    assert result.best.values[0] == pytest.approx(0.62, abs=0.02)
    assert all(0 <= candidate.values[0] <= 1 for candidate in result.history)


def test_never_worse_than_the_start():
    start = space_of(PAIR).start
    result = search(space_of(PAIR), lambda values: 0.5, budget=9)
    assert result.best.values == start, "of equal ones the start"
    assert search(space_of(PAIR), bowl, budget=1).best.values == start


def test_same_seed_same_search_and_another_seed_another_one():
    first, second = (search(space_of(PAIR), bowl, budget=20, seed=5) for _ in range(2))
    assert first == second
    assert first != search(space_of(PAIR), bowl, budget=20, seed=6)
    torch.manual_seed(1)
    assert first == search(space_of(PAIR), bowl, budget=20, seed=5), "no global generator is asked"


def test_a_killed_search_goes_on_where_it_was(tmp_path):
    calls: list[tuple[float, ...]] = []

    def counted(values):
        if len(calls) == 11:
            raise KeyboardInterrupt
        calls.append(values)
        return bowl(values)

    whole = search(space_of(PAIR), bowl, budget=25, seed=2)
    with pytest.raises(KeyboardInterrupt):
        search(space_of(PAIR), counted, budget=25, seed=2, cache=LossCache(tmp_path / "l.jsonl"))
    rest: list[tuple[float, ...]] = []

    def more(values):
        rest.append(values)
        return bowl(values)

    again = search(space_of(PAIR), more, budget=25, seed=2, cache=LossCache(tmp_path / "l.jsonl"))
    assert again == whole
    assert len(rest) == 25 - 11 and not {*rest} & {*calls}


def test_refused_and_broken_candidates_are_the_worst():
    def picky(values):
        if values[0] > 1.0:
            raise SettingsError("weight", values[0], "at most 1")
        if values[1] > 1.0:
            raise NumericsError("the merge is not finite")
        return math.nan if values[1] < -0.3 else bowl(values)

    result = search(space_of(PAIR), picky, budget=60, seed=1)
    assert result.best.values == pytest.approx((0.3, 0.7), abs=0.15)
    broken = [candidate for candidate in result.history if max(candidate.values) > 1.0]
    assert broken and all(candidate.loss == math.inf for candidate in broken)
    report = result.report(space_of(PAIR))
    json.dumps(report, allow_nan=False)
    assert report["tried"] == 60 and report["loss_before"] == bowl((1.0, 0.0))
    row = report["coordinates"][0]
    assert row == {"parameter": "one weight", "start": 1.0, "found": result.best.values[0]}


def test_the_start_must_work():
    with pytest.raises(NumericsError, match="as it is configured is not finite"):
        search(space_of(PAIR), lambda values: math.nan, budget=5)
    with pytest.raises(SettingsError, match="search is 0"):
        search(space_of(PAIR), bowl, budget=0)


def test_what_cannot_be_searched_says_so(monkeypatch):
    with pytest.raises(UsageError, match="writes no number"):
        space_of("merge_method: model_stock\nbase_model: a\nmodels: [{model: b}, {model: c}]\n")
    with pytest.raises(UsageError, match="greedy_soup has no coefficients"):
        space_of("merge_method: greedy_soup\nmodels: [{model: b}, {model: c}]\n")
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(MissingExtraError, match="cmaes"):
        search(space_of(PAIR), bowl, budget=2)


@pytest.mark.slow
def test_a_search_recovers_a_model_from_its_noisy_halves(tmp_path):
    """x + n and x - n: the weights that give x back are 1/2 and 1/2, and only held-out loss says so."""
    folder = tiny_models.save(tiny_models.build("llama2"), tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    draw = torch.Generator().manual_seed(0)
    middle = {name: checkpoint.load(name) for name in checkpoint.tensors}
    with torch.no_grad():  # a text that the model predicts: its own greedy continuation
        rows = torch.randint(4, 320, (4, 4), generator=draw)
        model = tiny_models.build("llama2")
        for _ in range(16):
            rows = torch.cat([rows, model(input_ids=rows).logits[:, -1].argmax(-1, keepdim=True)], 1)
    text = HeldOutText(rows[:, 3:])
    noise = {name: 0.8 * torch.randn(t.shape, generator=draw) * t.std() for name, t in middle.items()}

    def merged(values):
        a, b = values
        return {name: a * (x + noise[name]) + b * (x - noise[name]) for name, x in middle.items()}

    def loss(values):
        return text.loss_of(checkpoint.config, merged(values))

    result = search(space_of(PAIR), loss, budget=70, seed=1)
    parents = loss((1.0, 0.0)), loss((0.0, 1.0))
    assert result.history[0].loss == parents[0]
    assert result.best.loss < min(parents) - 0.7 and result.best.loss <= loss((0.5, 0.5)) + 0.1
    assert min(result.best.values) > 0.2, "both halves are needed"
