"""A base, three fine-tunes of it, and a way to merge them."""

import pytest
import torch

import attar
from tests import tiny_models


@torch.no_grad()
def tuned(base, seed, size=0.02):
    """A copy of a model with every weight moved a little."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_models.build("smollm")
    model.load_state_dict(base.state_dict())
    for parameter in model.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Folders ``base``, ``one``, ``two``, ``three``."""
    folder = tmp_path_factory.mktemp("family")
    base = tiny_models.build("smollm")
    positions = {"base": tiny_models.save(base, folder / "base")}
    for seed, name in enumerate(("one", "two", "three"), start=1):
        positions[name] = tiny_models.save(tuned(base, seed), folder / name)
    return positions


@pytest.fixture
def merged(family, tmp_path):
    """Merge by a configuration that calls the models by their names; the checkpoint."""

    def run(config, out="out", **settings):
        return attar.merge(config, tmp_path / out, models=family, **settings)

    return run
