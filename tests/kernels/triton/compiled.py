"""What the kernels become: every launch of a call, compiled for a card that is not there.

``triton.compile`` needs no GPU, and its wheel brings the assembler and the disassembler."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

CARDS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory of a program, in bytes, by the card's capability."""


@dataclass(frozen=True)
class Listing:
    """A compiled kernel.

    Attributes:
        instructions: how often each occurs, with its suffixes (LDG.E.128).
        stack: bytes of spilled registers and local arrays of a thread.
        shared: bytes of a program.
    """

    instructions: Counter
    stack: int
    shared: int

    def any(self, *prefixes):
        """Instructions that start with one of the prefixes."""
        return {name: count for name, count in self.instructions.items() if name.startswith(prefixes)}


def launches(monkeypatch, call):
    """Kernel, arguments and options of each launch that ``call`` makes."""
    from triton.runtime.jit import JITFunction

    made = []

    def run(self, *arguments, grid, warmup, **options):
        assert all(isinstance(n, int) and n >= 0 for n in grid), grid
        made.append((self, arguments, options))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        call()
    return made


def compiled(launch, card):
    """The :class:`Listing` of a launch on a card of this capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    kernel, arguments, options = launch
    signature, constants, attributes = {}, {}, {}
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        number = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or (number and value == 1):  # 1 is compiled in, as at a launch
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value if number else 1
        if address % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return _listing(triton.compile(source, target=GPUTarget("cuda", card, 32), options=options))


def _listing(kernel):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, text = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE)
    assert names, text[:500]
    stack = int(re.search(r"STACK:(\d+)", usage)[1])
    return Listing(Counter(names), stack, kernel.metadata.shared)
