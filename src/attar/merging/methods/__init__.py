"""The merge methods, one file each, and the table that names them.

To add a method, add its file and a row here. The row declares every parameter of its YAML; the function has a
keyword of the same name.
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
from attar.merging.methods.method import MergeMethod, Parameter
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

__all__ = ["METHODS", "MergeMethod", "Parameter"]

ZERO = 1e-12  # a sum of weights below this is 0


def _check_weights(shared: Mapping[str, Any], per_model: Mapping[str, Sequence[Any]]) -> None:
    """Weights that are divided by their sum must not sum to 0."""
    weights = per_model["weight"]
    if shared.get("normalize", shared.get("normalize_weights")) and abs(sum(weights)) < ZERO:
        raise SettingsError("weight", list(weights), "weights whose sum is not 0, or normalize: false")


def _check_task_weights(shared: Mapping[str, Any], per_model: Mapping[str, Sequence[Any]]) -> None:
    """As above; but all weights may be 0, which gives the base."""
    if any(per_model["weight"]):
        _check_weights(shared, per_model)


def _check_epsilon(shared: Mapping[str, Any], per_model: Mapping[str, Sequence[Any]]) -> None:
    """DELLA's probabilities density - epsilon ... density + epsilon lie between 0 and 1."""
    for density, epsilon in zip(per_model["density"], per_model["epsilon"], strict=True):
        if density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            allowed = f"at least 0 and below {min(density, 1 - density):g}, as density is {density:g}"
            raise SettingsError("epsilon", epsilon, allowed)


def _flag(name: str, default: bool) -> Parameter:
    return Parameter(name, default, kind=bool)


def _share(name: str) -> Parameter:
    return Parameter(name, 1.0, allowed="above 0 and at most 1", check=lambda v: 0 < v <= 1, span=(0.05, 1.0))


def _positive(name: str, default: float, kind: type = float) -> Parameter:
    return Parameter(name, default, kind=kind, allowed="above 0", check=lambda v: v > 0)


def _not_negative(name: str, default: float | None, span: tuple[float, float] | None = None) -> Parameter:
    return Parameter(
        name, default, required=default is None, allowed="at least 0", check=lambda v: v >= 0, span=span
    )


WEIGHT, DENSITY = Parameter("weight", required=True, span=(-0.5, 1.5)), _share("density")
GAMMA = Parameter(
    "gamma", 0.01, allowed="at least 0 and below 1", check=lambda v: 0 <= v < 1, span=(0.0, 0.1)
)
EPSILON = Parameter("epsilon", 0.15, allowed="at least 0 and below 0.5", check=lambda v: 0 <= v < 0.5)
INT8_MASK = _flag("int8_mask", False)  # without effect, as in mergekit


def _task(*, normalize: bool, rescale: bool) -> tuple[Parameter, ...]:
    """The shared parameters of the methods over task vectors."""
    lambda_ = Parameter("lambda", 1.0, span=(0.0, 2.0))
    return (_flag("normalize", normalize), _flag("rescale", rescale), INT8_MASK, lambda_)


# fmt: off
_ALL = (
    MergeMethod("linear", linear, "unused", (1, None),
        "weighted average", "Wortsman et al. 2022, arXiv 2203.05482",
        shared=(_flag("normalize", True),), per_model=(WEIGHT,), joint=_check_weights),
    MergeMethod("slerp", slerp, "required", (1, 1),
        "along the arc between the base and another model", "Shoemake 1985",
        shared=(Parameter("t", required=True, span=(0.0, 1.0)),), paper=True),
    MergeMethod("nuslerp", nuslerp, "optional", (2, 2),
        "along the arc between two models, or between their task vectors", "Shoemake 1985; mergekit",
        shared=(_flag("nuslerp_row_wise", False), _flag("nuslerp_flatten", True)), per_model=(WEIGHT,)),
    MergeMethod("multislerp", multislerp, "optional", (1, None),
        "weighted mean of directions in the tangent plane of the sphere at their average", "mergekit",
        shared=(_flag("normalize_weights", True), _positive("eps", 1e-8)), per_model=(WEIGHT,),
        joint=_check_weights),
    MergeMethod("karcher", karcher, "member", (1, None),
        "mean of directions on the sphere", "Karcher 1977",
        shared=(_positive("max_iter", 10, int), _positive("tol", 1e-5))),
    MergeMethod("task_arithmetic", task_arithmetic, "required", (1, None),
        "sum of task vectors", "Ilharco et al. 2022, arXiv 2212.04089",
        shared=_task(normalize=False, rescale=False), per_model=(WEIGHT, DENSITY),
        joint=_check_task_weights),
    MergeMethod("ties", ties, "required", (1, None),
        "task vectors trimmed to their largest entries, mean of the entries that agree in sign",
        "Yadav et al. 2023, arXiv 2306.01708",
        shared=_task(normalize=True, rescale=False), per_model=(WEIGHT, DENSITY),
        paper=True, scan=GlobalTrim.of),
    MergeMethod("dare_linear", dare_linear, "required", (1, None),
        "sum of task vectors with entries dropped at random", "Yu et al. 2023, arXiv 2311.03099",
        shared=_task(normalize=False, rescale=True), per_model=(WEIGHT, DENSITY),
        random=True, paper=True, joint=_check_task_weights),
    MergeMethod("dare_ties", dare_ties, "required", (1, None),
        "task vectors with entries dropped at random, mean of the entries that agree in sign",
        "Yu et al. 2023, arXiv 2311.03099",
        shared=_task(normalize=False, rescale=True), per_model=(WEIGHT, DENSITY),
        random=True, paper=True),
    MergeMethod("della", della, "required", (1, None),
        "entries dropped at random, small ones more often; mean of the entries that agree in sign",
        "Deep et al. 2024, arXiv 2406.11617",
        shared=_task(normalize=True, rescale=True), per_model=(WEIGHT, DENSITY, EPSILON),
        random=True, paper=True, joint=_check_epsilon),
    MergeMethod("della_linear", della_linear, "required", (1, None),
        "entries dropped at random, small ones more often; sum", "Deep et al. 2024, arXiv 2406.11617",
        shared=_task(normalize=False, rescale=True), per_model=(WEIGHT, DENSITY, EPSILON),
        random=True, paper=True, joint=_check_epsilon),
    MergeMethod("breadcrumbs", breadcrumbs, "required", (1, None),
        "task vectors without their largest and smallest entries, summed",
        "Davari, Belilovsky 2023, arXiv 2312.06795",
        shared=_task(normalize=False, rescale=False), per_model=(WEIGHT, DENSITY, GAMMA),
        joint=_check_task_weights),
    MergeMethod("breadcrumbs_ties", breadcrumbs_ties, "required", (1, None),
        "task vectors without their largest and smallest entries, mean of the entries that agree in sign",
        "Davari, Belilovsky 2023, arXiv 2312.06795",
        shared=_task(normalize=False, rescale=False), per_model=(WEIGHT, DENSITY, GAMMA)),
    MergeMethod("model_stock", model_stock, "required", (2, None),
        "between the base and the average, as far as the task vectors agree",
        "Jang, Yun, Han 2024, arXiv 2403.19522",
        shared=(_flag("filter_wise", False),)),
    MergeMethod("sce", sce, "required", (1, None),
        "entries where the models differ most, weighted by each task vector's size",
        "Wan et al. 2024, arXiv 2408.07990",
        shared=(INT8_MASK, _share("select_topk"))),
    MergeMethod("nearswap", nearswap, "required", (1, 1),
        "towards another model where both are close", "alchemonaut 2024, QuartetAnemoi-70B",
        shared=(_not_negative("t", None),)),
    MergeMethod("arcee_fusion", arcee_fusion, "required", (1, 1),
        "another model's entries where the change is large and the row's distribution moves",
        "Arcee 2025, mergekit 0.1"),
    MergeMethod("ram", ram, "required", (1, None),
        "mean over the models that changed an entry", "Yuan et al. 2026, arXiv 2601.13572",
        shared=(_not_negative("epsilon", 1e-5),)),
    MergeMethod("ramplus_tl", ramplus_tl, "required", (1, None),
        "as ram, with entries that only one model changed made larger",
        "Yuan et al. 2026, arXiv 2601.13572",
        shared=(_not_negative("r", 0.1, (0.0, 1.0)), _not_negative("alpha", 0.2, (0.0, 1.0)),
                _not_negative("epsilon", 1e-5))),
    MergeMethod("passthrough", passthrough, "unused", (1, 1),
        "one model's tensor, scaled or as it is",
        per_model=(Parameter("scale", None),)),
)
# fmt: on

METHODS: dict[str, MergeMethod] = {method.name: method for method in _ALL}
