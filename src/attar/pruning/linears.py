"""Which weights of a checkpoint become zeros: the Linears of the blocks, how each is stored, and where a
pruned weight comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.tensors import TORCH
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import matches, weight_of
from attar.models.loading.empty import empty_model
from attar.models.loading.single_experts import single_experts
from attar.models.loading.stored import stored_names
from attar.pruning.settings import ZerosSettings
from attar.sparsity import Sparsity, parse_sparsity

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class PrunedLinear:
    """A Linear that gets zeros.

    Attributes:
        stored: name of the stored weight.
        block: number of its block.
        shape: (N, K).
        transposed: stored as (K, N), as Conv1D does.
        dtype: type of the stored weight, which it keeps.
    """

    module: str
    stored: str
    block: int
    shape: tuple[int, int]
    transposed: bool
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    def turned(self, tensor: Tensor) -> Tensor:
        """The weight (N, K) of the tensor as it is stored, and the other way round."""
        return tensor.T.contiguous() if self.transposed else tensor


Linears = Mapping[str, PrunedLinear]
"""By module name, in forward order."""

Amounts = Mapping[str, Sparsity]
"""How many zeros each Linear gets, by module name."""

PrunedWeights = Callable[[PrunedLinear], Tensor]
"""``weights(linear)``: the pruned weight (N, K) in its stored type."""


def pruned_linears(checkpoint: Checkpoint, options: ZerosSettings) -> Linears:
    """The Linears of the blocks that are not ignored, by module name in forward order. Reads headers only.

    Raises:
        ModelError: every Linear is ignored, or a weight has no floating type.
        SettingsError: a pattern to ignore matches nothing, or N:M does not divide a layer's inputs.
    """
    checkpoint = single_experts(checkpoint)
    model = empty_model(checkpoint.config, unstacked=True)
    blocks = discover(model).blocks
    modules = {name: block.index for block in blocks for name in block.linears}
    for pattern in options.ignore:
        if not any(matches(name, pattern) for name in modules):
            raise SettingsError("ignore", pattern, "a pattern that some Linear's name matches")
    stored = stored_names(model, checkpoint)
    linears: dict[str, PrunedLinear] = {}
    for name, block in modules.items():
        if any(matches(name, pattern) for pattern in options.ignore):
            continue
        module = model.get_submodule(name)
        info = checkpoint.tensors[stored[f"{name}.weight"]]
        if info.dtype not in FLOATS:
            raise ModelError(
                f"{checkpoint.spelling}: {info.name} is stored as {info.dtype}",
                hint=f"zeros are set in dense weights: {', '.join(FLOATS)}",
            )
        rows, columns = weight_of(module).shape
        transposed = not isinstance(module, nn.Linear)
        dtype = getattr(torch, TORCH[info.dtype])
        linears[name] = PrunedLinear(name, info.name, block, (rows, columns), transposed, dtype)
    if not linears:
        raise ModelError(f"{checkpoint.path}: every Linear is ignored", hint="ignore fewer modules")
    _check_pattern_fits(linears, parse_sparsity(options.sparsity))
    return linears


def _check_pattern_fits(linears: Linears, sparsity: Sparsity) -> None:
    """Raise where N:M does not divide a layer's inputs."""
    wrong = [linear for linear in linears.values() if not sparsity.fits(linear.shape[1])]
    if not wrong:
        return
    kinds = ", ".join(sorted({linear.module.rpartition(".")[2] for linear in wrong}))
    allowed = (
        f"a pattern whose M divides every layer's inputs: {wrong[0].module} has {wrong[0].shape[1]} "
        f"({len(wrong)} layers: {kinds}); a fraction fits, or ignore them"
    )
    raise SettingsError("sparsity", str(sparsity), allowed)
