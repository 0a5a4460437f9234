"""Work for a compiled library, recorded: products, whole steps, the search for scales."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from attar.kernels import decode, ggml_search, structures
from attar.kernels.packed import GROUPS, PackedWeight, pack, pack_codes
from attar.quantization.grids import GGML
from attar.runtime.runner.compiled import compiled
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_mixtures, tiny_models
from tests.kernels.replay import Recording


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sparse_weights(kind: str) -> Iterator[PackedWeight]:
    """The same, 2:4."""
    kept = normal(70, 64, 4, seed=1).argsort(2).argsort(2).flatten(1) < 2
    if kind == "bf16":
        yield pack(normal(70, 256) * 0.05 * kept, "bf16", bias=normal(70), pays=lambda kind: True)
        return
    top = 16 if kind == "int4" else 128
    for group, zeroed in product(GROUPS, (False, True)):
        generator = torch.Generator().manual_seed(group)
        codes = torch.randint(0, top, (70, 256), generator=generator)
        zeros = torch.full((70, 256 // group), top // 2 if kind == "int4" else 128)
        if zeroed:
            zeros = torch.randint(0, top, zeros.shape, generator=generator)
        codes = torch.where(kept, codes, zeros.repeat_interleave(group, 1)).to(torch.uint8)
        scales = torch.rand(70, 256 // group, generator=generator) * 0.02 + 0.001
        stored = zeros.float() if zeroed else None
        yield pack_codes(codes, scales, stored, kind=kind, bias=normal(70), pays=lambda kind: True)


def packed_weights(kind: str) -> Iterator[PackedWeight]:
    """Every group, with and without zero points; 70 rows, which do not fill their panels."""
    if kind == "bf16":
        yield pack(normal(70, 256) * 0.05, "bf16", bias=normal(70))
        return
    top = 16 if kind == "int4" else 256
    for group, zeroed in product(GROUPS, (False, True)):
        generator = torch.Generator().manual_seed(group)
        codes = torch.randint(0, top, (70, 256), generator=generator, dtype=torch.uint8)
        scales = torch.rand(70, 256 // group, generator=generator) * 0.02 + 0.001
        zeros = torch.rand(70, 256 // group, generator=generator) * top if zeroed else None
        yield pack_codes(codes, scales, zeros, kind=kind, bias=normal(70))


def products(kind: str, bits: int = 8, sparse: bool = False) -> Recording:
    """One to forty tokens of every packed weight: blocks of eight and sixteen, and what is left."""
    recording = Recording()
    team = recording.call("attar_thread_pool", 2, checked=False)
    for packed, tokens in product((sparse_weights if sparse else packed_weights)(kind), (1, 2, 5, 8, 15, 40)):
        x, y, weight = (
            normal(tokens, 256, seed=tokens),
            torch.zeros(tokens, 70),
            structures.linear_struct(packed),
        )
        recording.keep([packed, x, y, weight])
        recording.call("attar_multiply", team, weight, x, tokens, bits, y)
        recording.want(y)
    return recording


def steps(family: str, **settings) -> Recording:
    """33 tokens; then seven more of them, and twenty of a second sequence."""
    model = (tiny_mixtures if family in tiny_mixtures.FAMILIES else tiny_models).build(family)
    runner = compiled(model.config, model.state_dict(), blocks=6, threads=2, **settings)
    recording, program = Recording(), runner._program
    parts = (program._layers, program._parts, program._caches, program._model)
    recording.keep([program.weights, program.pool, getattr(program, "_padded", []), *parts])
    handle = recording.call("attar_runner", program._model, 2, checked=False)
    ids = torch.randint(2, tiny_models.VOCABULARY, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    first = StepInput(ids[:33], (TokenSpan(0, 0, 33, (2, 0, 1), 33),))
    more = StepInput(ids[33:], (TokenSpan(0, 33, 40, (2, 0, 1), 7), TokenSpan(1, 0, 20, (3, 5), 20)))
    runner._program = Batches(recording, handle, program.weights.vocabulary)
    for step in (first, more):
        runner.run(step)
    return recording


class Batches:
    """Stands for a runner's program: what it is to run is recorded."""

    def __init__(self, recording: Recording, handle, vocabulary: int) -> None:
        self.recording, self.handle, self.vocabulary, self.block_size = recording, handle, vocabulary, 16

    def run(self, tokens) -> torch.Tensor:
        logits = torch.zeros(len(tokens.rows), self.vocabulary)
        batch, kept = decode.batch_struct(tokens, logits)
        self.recording.keep([batch, kept, logits])
        self.recording.call("attar_run", self.handle, batch)
        self.recording.want(logits)
        return logits


def searches(kind: str) -> Recording:
    """Nine rows of heavy tails, as they are and clipped."""
    recording, layout = Recording(), GGML[kind].layout
    weight = normal(9, 512) * 0.02 * torch.exp(normal(9, 512, seed=2))
    v = torch.exp(normal(512, seed=1))
    shrink = torch.rand(9, 512 // layout.tile, generator=torch.Generator().manual_seed(3)) * 0.5 + 0.5
    name = torch.frombuffer(bytearray(kind.encode() + b"\0"), dtype=torch.uint8)
    recording.keep([weight, v, shrink, name])
    for clip in (None, shrink):
        outputs = ggml_search._outputs(ggml_search._empty(layout, 9, 512, True))
        recording.keep(outputs)
        recording.call("attar_ggml_search", name, weight, v, 9, 512, 4, 2, clip, *outputs)
        recording.want(*(output for output in outputs if output is not None))
    return recording
