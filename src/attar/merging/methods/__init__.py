"""The merge methods, one file each, and the table that names them.

A method is added by its file and a row here. Every parameter that YAML may hold is declared in the row; the
function has a keyword of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.errors import SettingsError
from attar.merging.methods.arcee_fusion import arcee_fusion
from attar.merging.methods.breadcrumbs import breadcrumbs, breadcrumbs_ties
from attar.merging.methods.dare import dare_linear, dare_ties
from attar.merging.methods.della import della, della_linear
from attar.merging.methods.karcher import karcher
from attar.merging.methods.linear import linear
from attar.merging.methods.method import COMPATS, Method, Parameter
from attar.merging.methods.model_stock import model_stock
from attar.merging.methods.multislerp import multislerp
from attar.merging.methods.nearswap import nearswap
from attar.merging.methods.nuslerp import nuslerp
from attar.merging.methods.passthrough import passthrough
from attar.merging.methods.ram import ram, ramplus_tl
from attar.merging.methods.sce import sce
from attar.merging.methods.slerp import slerp
from attar.merging.methods.task_arithmetic import task_arithmetic
from attar.merging.methods.ties import GlobalTrim, ties

__all__ = ["COMPATS", "METHODS", "Method", "Parameter"]

TINY = 1e-12  # a sum of weights below this is 0


def _weights_have_a_sum(shared: Mapping[str, Any], each: Mapping[str, Sequence[Any]]) -> None:
    """Weights are divided by their sum: it must not be 0."""
    if shared.get("normalize", shared.get("normalize_weights")) and abs(sum(each["weight"])) < TINY:
        raise SettingsError("weight", list(each["weight"]), "weights whose sum is not 0, or normalize: false")


def _task_weights_have_a_sum(shared: Mapping[str, Any], each: Mapping[str, Sequence[Any]]) -> None:
    """As above; all weights 0 are allowed, and give the base."""
    if any(each["weight"]):
        _weights_have_a_sum(shared, each)


def _inside_zero_and_one(shared: Mapping[str, Any], each: Mapping[str, Sequence[Any]]) -> None:
    """DELLA's probabilities density - epsilon ... density + epsilon lie between 0 and 1."""
    for density, epsilon in zip(each["density"], each["epsilon"], strict=True):
        if density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            allowed = f"at least 0 and below {min(density, 1 - density):g}, as density is {density:g}"
            raise SettingsError("epsilon", epsilon, allowed)


WEIGHT = Parameter("weight", required=True, span=(-0.5, 1.5))
DENSITY = Parameter(
    "density", 1.0, allowed="above 0 and at most 1", check=lambda v: 0 < v <= 1, span=(0.05, 1.0)
)
GAMMA = Parameter(
    "gamma", 0.01, allowed="at least 0 and below 1", check=lambda v: 0 <= v < 1, span=(0.0, 0.1)
)
EPSILON = Parameter("epsilon", 0.15, allowed="at least 0 and below 0.5", check=lambda v: 0 <= v < 0.5)
LAMBDA = Parameter("lambda", 1.0, span=(0.0, 2.0))
INT8_MASK = Parameter("int8_mask", False, kind=bool)  # without effect, as in mergekit


def _positive(name: str, default: float, kind: type = float) -> Parameter:
    return Parameter(name, default, kind=kind, allowed="above 0", check=lambda v: v > 0)


def _not_negative(name: str, default: float | None, span: tuple[float, float] | None = None) -> Parameter:
    return Parameter(
        name, default, required=default is None, allowed="at least 0", check=lambda v: v >= 0, span=span
    )


def _task(*, normalize: bool, rescale: bool) -> tuple[Parameter, ...]:
    """The shared parameters of the methods over task vectors."""
    return (
        Parameter("normalize", normalize, kind=bool),
        Parameter("rescale", rescale, kind=bool),
        INT8_MASK,
        LAMBDA,
    )


_ALL = (
    Method(
        "linear",
        linear,
        "unused",
        (1, None),
        shared=(Parameter("normalize", True, kind=bool),),
        each=(WEIGHT,),
        joint=_weights_have_a_sum,
        summary="weighted average",
        source="Wortsman et al. 2022, arXiv 2203.05482",
    ),
    Method(
        "slerp",
        slerp,
        "required",
        (1, 1),
        shared=(Parameter("t", required=True, span=(0.0, 1.0)),),
        paper=True,
        summary="along the arc between the base and another model",
        source="Shoemake 1985",
    ),
    Method(
        "nuslerp",
        nuslerp,
        "optional",
        (2, 2),
        shared=(
            Parameter("nuslerp_row_wise", False, kind=bool),
            Parameter("nuslerp_flatten", True, kind=bool),
        ),
        each=(WEIGHT,),
        summary="along the arc between two models, or between their task vectors",
        source="Shoemake 1985; mergekit",
    ),
    Method(
        "multislerp",
        multislerp,
        "optional",
        (1, None),
        shared=(Parameter("normalize_weights", True, kind=bool), _positive("eps", 1e-8)),
        each=(WEIGHT,),
        joint=_weights_have_a_sum,
        summary="weighted mean of directions, in the plane that touches the sphere at their average",
        source="mergekit",
    ),
    Method(
        "karcher",
        karcher,
        "member",
        (1, None),
        shared=(_positive("max_iter", 10, int), _positive("tol", 1e-5)),
        summary="mean of directions on the sphere",
        source="Karcher 1977",
    ),
    Method(
        "task_arithmetic",
        task_arithmetic,
        "required",
        (1, None),
        shared=_task(normalize=False, rescale=False),
        each=(WEIGHT, DENSITY),
        joint=_task_weights_have_a_sum,
        summary="sum of task vectors",
        source="Ilharco et al. 2022, arXiv 2212.04089",
    ),
    Method(
        "ties",
        ties,
        "required",
        (1, None),
        shared=_task(normalize=True, rescale=False),
        each=(WEIGHT, DENSITY),
        paper=True,
        scan=GlobalTrim.of,
        summary="task vectors trimmed to their largest entries, mean of those that agree in sign",
        source="Yadav et al. 2023, arXiv 2306.01708",
    ),
    Method(
        "dare_linear",
        dare_linear,
        "required",
        (1, None),
        shared=_task(normalize=False, rescale=True),
        each=(WEIGHT, DENSITY),
        random=True,
        paper=True,
        joint=_task_weights_have_a_sum,
        summary="sum of task vectors with entries dropped at random",
        source="Yu et al. 2023, arXiv 2311.03099",
    ),
    Method(
        "dare_ties",
        dare_ties,
        "required",
        (1, None),
        shared=_task(normalize=False, rescale=True),
        each=(WEIGHT, DENSITY),
        random=True,
        paper=True,
        summary="task vectors with entries dropped at random, mean of those that agree in sign",
        source="Yu et al. 2023, arXiv 2311.03099",
    ),
    Method(
        "della",
        della,
        "required",
        (1, None),
        shared=_task(normalize=True, rescale=True),
        each=(WEIGHT, DENSITY, EPSILON),
        random=True,
        paper=True,
        joint=_inside_zero_and_one,
        summary="entries dropped at random, small ones more often; mean of those that agree in sign",
        source="Deep et al. 2024, arXiv 2406.11617",
    ),
    Method(
        "della_linear",
        della_linear,
        "required",
        (1, None),
        shared=_task(normalize=False, rescale=True),
        each=(WEIGHT, DENSITY, EPSILON),
        random=True,
        paper=True,
        joint=_inside_zero_and_one,
        summary="entries dropped at random, small ones more often; sum",
        source="Deep et al. 2024, arXiv 2406.11617",
    ),
    Method(
        "breadcrumbs",
        breadcrumbs,
        "required",
        (1, None),
        shared=_task(normalize=False, rescale=False),
        each=(WEIGHT, DENSITY, GAMMA),
        joint=_task_weights_have_a_sum,
        summary="task vectors without their largest and smallest entries, summed",
        source="Davari, Belilovsky 2023, arXiv 2312.06795",
    ),
    Method(
        "breadcrumbs_ties",
        breadcrumbs_ties,
        "required",
        (1, None),
        shared=_task(normalize=False, rescale=False),
        each=(WEIGHT, DENSITY, GAMMA),
        summary="task vectors without their largest and smallest entries, mean of those that agree in sign",
        source="Davari, Belilovsky 2023, arXiv 2312.06795",
    ),
    Method(
        "model_stock",
        model_stock,
        "required",
        (2, None),
        shared=(Parameter("filter_wise", False, kind=bool),),
        summary="between the base and the average, as far as the task vectors agree",
        source="Jang, Yun, Han 2024, arXiv 2403.19522",
    ),
    Method(
        "sce",
        sce,
        "required",
        (1, None),
        shared=(
            INT8_MASK,
            Parameter(
                "select_topk",
                1.0,
                allowed="above 0 and at most 1",
                check=lambda v: 0 < v <= 1,
                span=(0.05, 1.0),
            ),
        ),
        summary="entries where the models differ most, weighted by each task vector's size",
        source="Wan et al. 2024, arXiv 2408.07990",
    ),
    Method(
        "nearswap",
        nearswap,
        "required",
        (1, 1),
        shared=(_not_negative("t", None),),
        summary="towards another model where both are close",
        source="alchemonaut 2024, QuartetAnemoi-70B",
    ),
    Method(
        "arcee_fusion",
        arcee_fusion,
        "required",
        (1, 1),
        summary="another model's entries where the change is large and the row's distribution moves",
        source="Arcee 2025, mergekit 0.1",
    ),
    Method(
        "ram",
        ram,
        "required",
        (1, None),
        shared=(_not_negative("epsilon", 1e-5),),
        summary="mean over the models that changed an entry",
        source="Yuan et al. 2026, arXiv 2601.13572",
    ),
    Method(
        "ramplus_tl",
        ramplus_tl,
        "required",
        (1, None),
        shared=(
            _not_negative("r", 0.1, (0.0, 1.0)),
            _not_negative("alpha", 0.2, (0.0, 1.0)),
            _not_negative("epsilon", 1e-5),
        ),
        summary="as ram, with entries that only one model changed made larger",
        source="Yuan et al. 2026, arXiv 2601.13572",
    ),
    Method(
        "passthrough",
        passthrough,
        "unused",
        (1, 1),
        each=(Parameter("scale", None, span=None),),
        summary="one model's tensor, scaled or as it is",
        source="",
    ),
)

METHODS: dict[str, Method] = {method.name: method for method in _ALL}
