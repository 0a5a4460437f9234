"""Every vector of mergekit's own functions; the origin is in tests/merging/golden/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.merging.methods import METHODS

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "mergekit.json").read_text())
WEIGHT = {"weight": [0.5, 0.4, 0.3]}
THIRDS = {"weight": [0.2, 0.3, 0.5]}

# name of the vector: method, models, whether there is a base, parameters
CASES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "linear w=.2,.3,.5": ("linear", "abc", False, THIRDS),
    "task_arithmetic w=.5,.4,.3 lambda=.8": ("task_arithmetic", "abc", True, WEIGHT | {"lambda": 0.8}),
    "ties density=.5 w=.5,.4,.3": ("ties", "abc", True, WEIGHT | {"density": [0.5] * 3}),
    "ties density=.5 w=.5,.4,.3 normalize=false": (
        "ties",
        "abc",
        True,
        WEIGHT | {"density": [0.5] * 3, "normalize": False},
    ),
    "breadcrumbs density=.6 gamma=.1 w=.5,.4,.3": (
        "breadcrumbs",
        "abc",
        True,
        WEIGHT | {"density": [0.6] * 3, "gamma": [0.1] * 3},
    ),
    "dare_linear density=.5 seed=0 w=.5,.4,.3": ("dare_linear", "abc", True, WEIGHT | {"density": [0.5] * 3}),
    "dare_ties density=.5 seed=0 w=.5,.4,.3": ("dare_ties", "abc", True, WEIGHT | {"density": [0.5] * 3}),
    "della density=.5 epsilon=.15 seed=0 w=.5,.4,.3": (
        "della",
        "abc",
        True,
        WEIGHT | {"density": [0.5] * 3, "epsilon": [0.15] * 3},
    ),
    "slerp t=.35 a,b": ("slerp", "ab", False, {"t": 0.35}),
    "slerp t=.35 a,a*1.001(lerp path)": ("slerp", "aA", False, {"t": 0.35}),
    "nuslerp t=.35 flatten": ("nuslerp", "ab", False, {"weight": [0.65, 0.35]}),
    "nuslerp t=.35 per-last-dim": (
        "nuslerp",
        "ab",
        False,
        {"weight": [0.65, 0.35], "nuslerp_flatten": False},
    ),
    "nuslerp t=.35 dim0(row_wise=true)": (
        "nuslerp",
        "ab",
        False,
        {"weight": [0.65, 0.35], "nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "multislerp w=.2,.3,.5": ("multislerp", "abc", False, THIRDS),
    "multislerp w=.2,.3,.5 base": ("multislerp", "abc", True, THIRDS),
    "karcher a,b,c": ("karcher", "abc", False, {}),
    "sce select_topk=1": ("sce", "abc", True, {}),
    "sce select_topk=.5": ("sce", "abc", True, {"select_topk": 0.5}),
    "nearswap t=.1 a": ("nearswap", "a", True, {"t": 0.1}),
    "ram": ("ram", "ab", True, {"epsilon": 0.5}),
    "ramplus_tl": ("ramplus_tl", "ab", True, {"epsilon": 0.5}),
    "model_stock": ("model_stock", "abc", True, {}),
    "model_stock filter_wise": ("model_stock", "abc", True, {"filter_wise": True}),
}


class TorchMasks:
    """Masks from a generator of torch, with mergekit's calls; models that share it draw in turn."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def below(self, probability: float | torch.Tensor, count: int) -> torch.Tensor:
        p = probability if isinstance(probability, torch.Tensor) else torch.full((count,), probability)
        return torch.bernoulli(p.float().flatten(), generator=self.generator).bool()


def vector(name: str) -> torch.Tensor:
    if name == "A":
        return vector("a") * 1.001
    return torch.tensor(VECTORS[name]).reshape(4, 5)


def test_every_vector_is_tested() -> None:
    assert set(CASES) == set(VECTORS) - {"_meta", "base", "a", "b", "c"}


@pytest.mark.parametrize("name", CASES)
def test_vector(name: str) -> None:
    method_name, models, has_base, given = CASES[name]
    method, tensors = METHODS[method_name], [vector(model) for model in models]
    base = vector("base") if has_base else None
    if method_name == "slerp":  # its first model is the base
        base, tensors = tensors[0], tensors[1:]
    generator = TorchMasks(torch.Generator().manual_seed(0))
    result = method.merge(
        tensors,
        base,
        shared={p.name: given.get(p.name, p.default) for p in method.shared},
        per_model={p.name: given.get(p.name, [p.default] * len(tensors)) for p in method.per_model},
        masks=[generator] * len(tensors),
    )
    assert torch.allclose(result, vector(name), rtol=0, atol=2e-6)


def test_torch_masks_are_those_of_a_seeded_generator() -> None:
    torch.manual_seed(0)
    expected = torch.bernoulli(torch.full((4, 5), 0.5)).bool().flatten()
    assert torch.equal(TorchMasks(torch.Generator().manual_seed(0)).below(0.5, 20), expected)
