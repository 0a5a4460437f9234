"""What the keys of a quantized model are rounded in with ``kv_dtype="int4"``, from the calibration text.

    c_0 = mean of k,   c_1 = mean of the keys at position 0,   d_i = (sum q_i^2 / sum (k_i - c_0i)^2)^(1/4)

for each layer and kv head, over all tokens but the first of a row and the queries of the head's group; d is
divided by its geometric mean and bounded. The rotary embedding turns means from one position to the next, so
rows are spread over as many positions as fixed tokens are (key_means.py), unless a layer has a window; the
first token of each is at position 0 as well, alone.

With codes of s steps in all channels of (k - c) D, the error of a score is that of sum_i q_i^2 / d_i^2 at a
step that grows with sum_i d_i^2 k_i^2: their product is least with this d, which is SmoothQuant's scaling
(Xiao et al. 2022, arXiv 2211.10438) with root mean squares in the place of the largest numbers.

The model runs through the runtime's modules, with an exact cache, and what the runtime does to keys before
they are stored is done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.errors import SettingsError
from attar.progress import Progress
from attar.quantization.kv_bits import check_bits, choose_formats, layer_losses
from attar.runtime.kv.basis_file import write_basis
from attar.runtime.kv.blocks import blocks_for
from attar.runtime.kv.memory import layer_shapes
from attar.runtime.kv.store.rotated import CacheBasis
from attar.runtime.loading import load
from attar.runtime.runner.kept_shapes import probed_shape
from attar.runtime.runner.key_means import POSITIONS
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.probe import probe
from attar.runtime.step import StepInput, TokenSpan

BLOCK = 16
MOST = 8.0  # factors are within 1 / MOST and MOST
ROWS = 8  # of the calibration text


class KeyStatistics:
    """An observer of the modules' attention, as eviction has them: sums over tokens of whole sequences."""

    def __init__(self) -> None:
        self.sums: dict[int, dict[str, Tensor]] = {}

    def observe(self, layer: int, span: TokenSpan, q: Tensor, k: Tensor, *_: Any) -> None:
        """q (t, h, d) of a sequence over its keys k (t, kv_heads, d); of one token alone its key counts as a
        first one."""
        if len(k) == 1:
            parts = {"first": k[0].double(), "sequences": torch.tensor(1.0)}
        else:
            k, queries = k[1:].double(), q[1:].double().unflatten(1, (k.shape[1], -1))
            parts = {
                "tokens": torch.tensor(float(len(k))),
                "k": k.sum(0),
                "kk": k.square().sum(0),
                "qq": queries.square().sum((0, 2)),
            }
        known = self.sums.setdefault(layer, {})
        for name, part in parts.items():
            known[name] = known.get(name, 0) + part

    def basis(self) -> CacheBasis:
        """The formulas above."""
        layers = [self.sums[layer] for layer in sorted(self.sums)]
        centers, factors = [], []
        for seen in layers:
            mean = seen["k"] / seen["tokens"]
            spread = (seen["kk"] / seen["tokens"] - mean.square()).clamp(min=0)
            logs = (seen["qq"] / seen["tokens"]).clamp(min=1e-30).log() - spread.clamp(min=1e-30).log()
            logs = (logs - logs.mean(-1, keepdim=True)) / 4
            factors.append(logs.exp().clamp(1 / MOST, MOST))
            centers.append(torch.stack((mean, seen["first"] / seen["sequences"])))
        return CacheBasis(torch.stack(centers, 1).float(), torch.stack(factors).float())


def check_cache(config: Mapping[str, Any], kv_bits: float = 0.0) -> None:
    """Refuse a model whose keys have no basis, before any work, by its ``config.json``.

    Raises:
        SettingsError: no keys, or latents, or heads of an odd width; or ``kv_bits`` is outside of the bits of
            int4 and int8.
        ModelError: the runtime does not run the model, or its layers' heads differ.
    """
    try:
        shape, reason = probed_shape(config), ""
    except (RuntimeError, TypeError):  # GPT-2 needs its weights to be run: the runtime decides at the end
        return check_bits(kv_bits, layer_shapes(config)[0].head_dim)
    if not shape.layers:
        reason = "keeps no keys and values"
    elif shape.latent:
        reason = "keeps latents (MLA)"
    elif shape.head_dim % 2:
        reason = "has heads of an odd width"
    if reason:
        raise SettingsError("kv_cache", "int4", f"none: {config.get('model_type')} {reason}")
    return check_bits(kv_bits, shape.head_dim)


def calibrate_basis(
    checkpoint: Checkpoint,
    batches: Sequence[Tensor],
    folder: Path,
    progress: Progress,
    kv_bits: float = 0.0,
) -> dict[str, Any]:
    """Write the basis of a quantized model's int4 cache into its folder. Returns the entry of its card.

    Args:
        batches: int64 (B, S) of the calibration text, of which :data:`ROWS` rows are run.
        kv_bits: average bits of a number, in layers of int4 and layers of int8; 0: int4 in all.

    Raises:
        ModelError: the modules do not run the model.
    """
    rows = [row for batch in batches for row in batch.tolist()][:ROWS]
    basis, report = basis_over(checkpoint, rows, progress), {"rows": len(rows), "tokens": sum(map(len, rows))}
    if kv_bits:
        choice = choose_formats(layer_losses(checkpoint, basis, rows, progress), basis, kv_bits)
        basis, report = replace(basis, formats=choice.formats), {**report, **choice.report()}
        progress.log(choice.note())
    write_basis(basis, folder)
    return report


def basis_over(checkpoint: Checkpoint, rows: Sequence[Sequence[int]], progress: Progress) -> CacheBasis:
    """The basis of a model over rows of tokens; raises as :func:`calibrate_basis`."""
    longest = max(map(len, rows))
    room = longest + 2 * BLOCK
    runner = load(checkpoint, runner="modules", kv_dtype="float32", kv_tokens=room, block_size=BLOCK).runner
    assert isinstance(runner, Modules)
    shape = probe(runner.model)
    last_start = 0 if any(shape.windows) else max(min(shape.context or 0, POSITIONS) - longest, 0)
    statistics = KeyStatistics()
    runner._observer = statistics  # type: ignore[assignment]
    with progress.task("keys", len(rows)) as task:
        for index, row in enumerate(rows):
            start = index * last_start // max(len(rows) - 1, 1)
            blocks = tuple(range(1, 1 + blocks_for(len(row), BLOCK)))
            row_span = TokenSpan(1, start, start + len(row), blocks, kept=0 if start else None)
            runner.run(StepInput([row[0], *row], (TokenSpan(0, 0, 1, (0,)), row_span)))
            task.advance()
    return statistics.basis()
