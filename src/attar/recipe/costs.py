"""What each method of quantization and pruning takes, by name: without torch, which the methods import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MethodCost:
    """Work and memory of a method.

    Attributes:
        passes: of the calibration text through the model, forward.
        swept: models whose blocks are swept; 2: the original's too.
        products: N K^2 operations of each Linear with its Hessian: its factor, the rounding, the report.
        columns: passes over the columns, one by one.
        matrices: of a Hessian's size at the peak of memory, the Hessian among them.
        backward: the whole model runs backward.
        trained: the whole model is trained, after the rounding that it starts from.
    """

    passes: float = 0.0
    swept: int = 0
    products: float = 0.0
    columns: int = 0
    matrices: float = 0.0
    backward: bool = False
    trained: bool = False


METHOD_COSTS = {
    "rtn": MethodCost(),
    "smoothquant": MethodCost(),
    "awq": MethodCost(swept=1, products=3, matrices=2),
    "gptq": MethodCost(swept=1, products=6, columns=1, matrices=2),
    "gptaq": MethodCost(swept=2, products=6, columns=1, matrices=12),
    "qronos": MethodCost(swept=2, products=6, columns=1, matrices=6),
    "yaqa": MethodCost(swept=2, products=6, columns=1, matrices=8, backward=True),
    "autoround": MethodCost(swept=1, matrices=3),
    "qat": MethodCost(trained=True),
}
"""By the methods of attar.quantization.rounding.METHODS."""

EXL2_COST = MethodCost(swept=1, products=6, columns=1, matrices=3)

RECONSTRUCTION_COST = MethodCost(swept=1, products=31, matrices=1)
"""Least squares for the weights that stay: the target, the first residual, 20 steps."""

PRUNE_COSTS = {
    "magnitude": MethodCost(),
    "wanda": MethodCost(swept=1),
    "sparsegpt": MethodCost(swept=1, products=6, columns=1, matrices=2),
    "alps": MethodCost(swept=1, products=200, matrices=4),
    **dict.fromkeys(
        ("heads", "query-heads", "neurons", "hidden", "layers", "experts", "mixed"), MethodCost(passes=1)
    ),
}
"""By the methods of attar.pruning.stage.METHODS, with the first criterion of each."""

CRITERION_PASSES = {"gradient": 3.0, "taylor": 3.0, "run": 3.0}
"""Passes of a criterion of units that takes more than one; "kl": half a pass for each layer."""
GRADIENTS = ("gradient", "taylor")
"""Criteria that need a backward pass."""


def criterion_of(options: Any) -> str:
    """The criterion of a pruning of units; over all layers at once the gradient where none is named."""
    criterion = str(getattr(options, "criterion", ""))
    over_layers = criterion == "auto" and getattr(options, "scope", "layer") == "global"
    return "gradient" if over_layers else criterion
