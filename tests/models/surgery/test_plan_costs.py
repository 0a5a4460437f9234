"""What a plan costs is what the cut model's file has."""

import dataclasses
import itertools
import random

import pytest
import torch

from attar.models.loading.load import load_model, save_model
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.plan_costs import PlanGrid, PlanSizes, byte_cost, parameter_cost, read_cost
from attar.models.surgery.plan_space import first_units, plan_space
from tests import tiny_models


def random_plans(space, count, seed=0):
    """Plans of the grid that the config can say."""
    draws = random.Random(seed)
    plans = (PlanSizes(*(draws.choice(values) for values in space.grid)) for _ in range(4 * count))
    return list(dict.fromkeys(itertools.islice(filter(space.allows, plans), count)))


def space_of(model, storage=torch.float32):
    return plan_space({**model.config.to_dict(), "architectures": [type(model).__name__]}, storage)


def check(model, plans, space, removal, storage, folder):
    planned = dataclasses.replace(space.planned, removal=tuple(removal))
    for plan in plans:
        layers = planned.kept_layers(plan.layers)
        cut = cut_model(model, space.cut_plan(plan, first_units(space.full), layers))
        save_model(cut, folder, dtype=storage)
        assert planned.file_bytes(plan) == (folder / "model.safetensors").stat().st_size, plan
        assert planned.parameters(plan) == cut.num_parameters(), plan


@pytest.mark.few(1)
@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_bytes_and_parameters_are_exact_in_every_family(family, tmp_path):
    model = tiny_models.build(family)
    space = space_of(model)
    plans = [space.full, *random_plans(space, 3)]
    assert any(plan != space.full for plan in plans)
    check(model, plans, space, [2, 0, 1], torch.float32, tmp_path)


@pytest.mark.slow
def test_bytes_of_twenty_plans_of_a_trained_model_are_exact(tmp_path):
    model = load_model("attar:tiny", dtype=torch.float32)
    space = space_of(model, torch.bfloat16)
    plans = random_plans(space, 21)
    assert len(plans) >= 20
    check(model, plans, space, [3, 1, 0, 2, 7, 6, 4, 5], torch.bfloat16, tmp_path)


@pytest.mark.slow
def test_a_table_over_a_grid_has_the_costs_of_its_plans():
    model = tiny_models.build("llama2")  # an untied head
    planned = space_of(model, torch.bfloat16).planned
    grid = PlanGrid((1, 3, 4), (12, 96), (32, 64), (1, 2, 3))
    parameters, read = planned.over(grid, parameter_cost), planned.over(grid, read_cost)
    assert parameters.shape == (3, 2, 2, 3)
    for flat in range(parameters.numel()):
        plan = grid.plan(flat)
        assert parameters.flatten()[flat] == planned.parameters(plan)
        embedding = 2 * tiny_models.VOCABULARY * plan.hidden
        assert read.flatten()[flat] == planned.read_bytes(plan) == 2 * planned.parameters(plan) - embedding
    assert torch.equal(planned.over(grid, byte_cost), 2 * parameters)


def test_layers_go_in_the_order_of_the_removal():
    model = tiny_models.build("llama2")
    space = space_of(model)
    planned = dataclasses.replace(space.planned, removal=(1, 2, 0))
    assert [planned.kept_layers(count) for count in (3, 2, 1)] == [[0, 1, 2], [0, 2], [0]]
    names = [name for name, *_ in planned.headers(space.full._replace(layers=2)) if "layers." in name]
    assert {name.split(".")[2] for name in names} == {"0", "1"}


def test_what_is_cut_is_said():
    full = PlanSizes(4, 768, 256, 8)
    assert PlanSizes(2, 768, 256, 6).text(full) == "2 of 4 head groups, 6 of 8 layers"
    assert full.text(full) == "nothing cut" and full.cut_structures(full) == ()
