"""Which layers of the int4 cache keep 8 bits, under an average: ``--kv-bits``.

    loss_l = KL(P || P_l)        P: every layer's keys and values in int8,  P_l: those of layer l in int4
    minimise  sum of loss_l over the layers in int4      under the bits of a token       (allocate.py)

A prompt runs once with an exact cache. For each layer what it wrote is rounded anew, and a tail of tokens is
run behind it: P is the mean over its predictions. So a layer costs a tail, behind a context as long as those
that a cache is for; what the rounding changes in the prompt's own later layers is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.errors import SettingsError
from attar.progress import Progress
from attar.quantization.mixed_precision.allocate import Option, allocate
from attar.runtime.kv.blocks import blocks_for
from attar.runtime.kv.memory import LayerShape, block_bytes
from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.store.mixed import MixedStore
from attar.runtime.kv.store.rotated import CacheBasis
from attar.runtime.loading import load
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan
from attar.walks.objectives import token_kl

BLOCK = 16
CHUNK = 512  # tokens of a step
LONGEST = 2048  # tokens of a sequence
TAIL = 256  # and at most a quarter of the text


@dataclass(frozen=True)
class FormatChoice:
    """A format for each layer.

    Attributes:
        formats: int4 or int8.
        bits: average of a cached number, scales included.
        kl: the sum of the losses of the layers in int4, nats a token.
        losses: of each layer.
    """

    formats: tuple[str, ...]
    bits: float
    kl: float
    losses: tuple[float, ...]

    def note(self) -> str:
        """In words."""
        wide = f"{self.formats.count('int8')} of {len(self.formats)} layers keep 8 bits"
        kl = f"predicted KL {self.kl:.3g} nats, {sum(self.losses):.3g} with every layer in int4"
        return f"KV cache: {wide}, {self.bits:.3g} bits a number; {kl}"

    def report(self) -> dict[str, Any]:
        """For the card: the layers in int8 by their numbers."""
        wide = [layer for layer, name in enumerate(self.formats) if name == "int8"]
        return {"bits": self.bits, "int8": wide, "kl": self.kl, "losses": list(self.losses)}


def check_bits(kv_bits: float, head_dim: int) -> None:
    """Refuse an average that no mix of int4 and int8 has; 0 is none.

    Raises:
        SettingsError: names both ends.
    """
    low, high = (number_bits(name, head_dim) for name in ("int4", "int8"))
    if kv_bits and not low <= kv_bits <= high:
        ends = f"between {low:g} (int4) and {high:g} (int8) with heads of {head_dim}"
        raise SettingsError("kv_bits", kv_bits, f"{ends}, or 0 for int4 in all layers")


def number_bits(name: str, head_dim: int) -> float:
    """Bits of a cached number in a format, scales included."""
    return 8 * block_bytes([LayerShape(1, head_dim)], name, 1) / (2 * head_dim)


def choose_formats(losses: Sequence[float], basis: CacheBasis, kv_bits: float) -> FormatChoice:
    """The formats of the smallest summed loss whose average stays within ``kv_bits``.

    Args:
        losses: of :func:`layer_losses`.
    """
    layers, kv_heads, head_dim = basis.factors.shape
    layer, numbers = LayerShape(kv_heads, head_dim), 2 * layers * kv_heads * head_dim
    four, eight = (8 * block_bytes([layer], name, 1) for name in ("int4", "int8"))
    options = {
        str(index): [Option("int4", four, loss), Option("int8", eight, 0.0)]
        for index, loss in enumerate(losses)
    }
    chosen = allocate(options, int(kv_bits * numbers))
    return FormatChoice(tuple(chosen.choice.values()), chosen.bits / numbers, chosen.loss, tuple(losses))


def layer_losses(
    checkpoint: Checkpoint, basis: CacheBasis, rows: Sequence[Sequence[int]], progress: Progress
) -> list[float]:
    """The loss of each layer in int4, nats a token; see above.

    Args:
        rows: of the calibration text, which are read as sequences of at most the context.

    Raises:
        ModelError: the modules do not run the model.
    """
    text = [token for row in rows for token in row]
    room = len(text) + 2 * BLOCK
    runner = load(checkpoint, runner="modules", kv_dtype="float32", kv_tokens=room, block_size=BLOCK).runner
    assert isinstance(runner, Modules)
    longest = min(LONGEST, runner.context or LONGEST, len(text))
    sequences = [text[start : start + longest] for start in range(0, len(text) - longest + 1, longest)]
    losses = torch.zeros(len(basis.factors), dtype=torch.float64)
    with progress.task("layers of the KV cache", len(sequences) * len(losses)) as task:
        for tokens in sequences:
            cached = CachedPrompt(runner, tokens)
            wide = ("int8",) * len(losses)
            reference = cached.logits(replace(basis, formats=wide))
            for layer in range(len(losses)):
                formats = (*wide[:layer], "int4", *wide[layer + 1 :])
                rounded = cached.logits(replace(basis, formats=formats))
                losses[layer] += token_kl(reference, rounded).mean().cpu() / len(sequences)
                task.advance()
    return [float(loss) for loss in losses]


class CachedPrompt:
    """What the first tokens of a text wrote to an exact cache, and the others; no sequence else runs."""

    def __init__(self, runner: Modules, tokens: Sequence[int]) -> None:
        self._runner, self._exact, self._tokens = runner, runner.pool, tokens
        self._blocks = tuple(range(blocks_for(len(tokens), BLOCK)))
        self._prompt = len(tokens) - min(TAIL, -(-len(tokens) // 4))
        runner.forget(0)
        for start in range(0, self._prompt, CHUNK):
            stop = min(start + CHUNK, self._prompt)
            runner.run(StepInput(tokens[start:stop], (TokenSpan(0, start, stop, self._blocks),)))

    def logits(self, basis: CacheBasis) -> Tensor:
        """float32 (t, vocabulary) of the tail, with the cache in the formats of a basis."""
        runner, exact, start, stop = self._runner, self._exact, self._prompt, len(self._tokens)
        dtype, device = exact.dtype, exact.device
        pool = KVPool(exact.geometry, "int4", formats=basis.formats, dtype=dtype, device=device)
        assert isinstance(pool.store, MixedStore)
        pool.store.basis = basis
        slots = torch.arange(start, device=device)
        for layer in range(exact.geometry.layers):
            pool.write(layer, slots, *exact.gather(layer, self._blocks, start))
        runner.fork(0, 1)
        runner.pool = pool
        rows = runner.run(
            StepInput(self._tokens[start:], (TokenSpan(1, start, stop, self._blocks, stop - start),))
        )
        runner.pool = exact
        runner.forget(1)
        return rows
