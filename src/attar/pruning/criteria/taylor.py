"""Importance of heads and neurons from all their weights, to the first order.

LLM-Pruner: Ma, Fang, Wang 2023, arXiv 2305.11627, eq. 5 (element-wise, first order) with the sum over a
coupled structure, after Molchanov et al. 2019, arXiv 1906.10771, eq. 3 and 6:

    I_u = E_b sum_{w in u} | w dL_b / dw |

Letters: u the weights of a unit: of a neuron its rows of up and gate and its column of down; of a head its
rows of q (of k and v, where they go with it) and its columns of o. L_b the loss of a batch.

Differs from the paper: the mean over batches of absolute values, where the authors take one gradient of all
calibration rows; the sum survives a kill. Biases do not count. The criterion ``gradient`` is the sum
over a neuron's column of down before the absolute value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from attar.importance.scoring import UnitScoring
    from attar.models.anatomy.unit_weights import UnitWeights


def taylor_importance(scoring: UnitScoring) -> Tensor:
    """I, float64 (layers, U). Does not modify the model; its memory is the memory of the blocks' gradients.

    Raises:
        NumericsError: a gradient is not finite.
    """
    modules = list(dict.fromkeys(module for layer in scoring.weights for module in _modules(layer)))
    parameters = [module.get_parameter("weight") for module in modules]

    def measure(batch: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.requires_grad_(True)
        gradients = torch.autograd.grad(scoring.loss(scoring.model, batch), parameters)
        products = {}
        for module, parameter, gradient in zip(modules, parameters, gradients, strict=True):
            parameter.requires_grad_(False)
            product = (parameter.detach() * gradient).abs()
            products[module] = product if isinstance(module, nn.Linear) else product.T  # Conv1D
        return torch.stack([unit_sums(layer, products) for layer in scoring.weights]) * len(batch)

    with scoring.frozen():
        return scoring.total("taylor", measure) / scoring.sequences


def unit_sums(layer: UnitWeights, products: dict[nn.Module, Tensor]) -> Tensor:
    """Sums over each unit's weights of the products (N, K) of its modules, float64 (U,)."""
    total = layer.sums(products[layer.consumer].double().sum(0))
    for module, units in layer.producers:
        rows, units = products[module].double().sum(1), units.to(total.device)
        total.index_add_(0, units[units >= 0], rows[units >= 0])
    return total


def _modules(layer: UnitWeights) -> Iterator[nn.Module]:
    yield layer.consumer
    for module, _ in layer.producers:
        yield module
