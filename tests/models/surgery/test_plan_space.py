"""Which structures a family's config can have fewer of."""

import pytest
import torch

from attar.models.surgery.plan_space import UnitRanking, plan_space, snap
from tests import tiny_models


def space_of(family, **changes):
    model = tiny_models.build(family, **changes)
    return plan_space({**model.config.to_dict(), "architectures": [type(model).__name__]}, torch.float32)


def test_a_llama_allows_everything():
    space = space_of("llama3")
    assert space.structures == ("heads", "neurons", "hidden", "layers") and not space.refused
    assert space.full == (4, 96, 64, 3)
    for chosen, measured in zip(space.grid, space.measured, strict=True):
        assert min(chosen) >= min(measured) and max(chosen) == max(measured)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt2", "opt", "bert"])
def test_structures_that_a_config_cannot_say_are_refused_by_name(family):
    space = space_of(family)
    assert "heads" in space.refused and "neurons" in space.structures
    assert space.grid.heads == space.measured.heads == (space.full.heads,)
    assert "config" in space.refused["heads"]


def test_a_plan_names_units_by_rank_and_one_layer_alone():
    space = space_of("llama3")
    ranking = UnitRanking([[3, 1, 0, 2]] * 3, [list(range(95, -1, -1))] * 3, list(range(63, -1, -1)))
    plan = space.cut_plan(space.full._replace(heads=2, neurons=24, hidden=32), ranking, range(3))
    assert plan.heads[0] == (2, 3, 6, 7)  # query heads of groups 1 and 3
    assert plan.neurons[1] == tuple(range(72, 96)) and plan.hidden == tuple(range(32, 64))
    assert plan.layers is None
    alone = space.cut_plan(space.full._replace(neurons=24), ranking, range(3), alone=1)
    assert [len(kept) for kept in alone.neurons] == [96, 24, 96] and alone.heads is None
    assert space.cut_plan(space.full, ranking, [0, 2]).layers == (0, 2)


@pytest.mark.parametrize(
    ("units", "multiple"),
    [(1536, 64), (768, 32), (11008, 256), (96, 4), (576, 32), (256, 32), (2048, 128), (7, 1)],
)
def test_sizes_are_multiples_that_kernels_can_use(units, multiple):
    assert snap("neurons", units) == multiple
    assert snap("heads", units) == 1
