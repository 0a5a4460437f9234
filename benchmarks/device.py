"""The device runner on a device: its operators against their bodies on the CPU, its products' speed, steps of
models with random weights made there. A part of `make gpu`; never run on a GPU.

    python benchmarks/device.py --part operators|products|steps|answers [--device cuda]

    operators  each product and attention beside its torch body on the CPU, and twice bit for bit
    products   microseconds and GB/s of weights at 1, 8 and 64 rows, beside torch's bfloat16 product
    steps      tokens/s: decode at 1 and 64, a prompt of 512 and of 4,096, graphs on and off
    answers    greedy tokens of attar:tiny beside the compiled runner on the CPU"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attar.kernels.decode import LayerWeights, ModelWeights
from attar.kernels.device import planes
from attar.kernels.device.attention import paged_attention
from attar.kernels.device.products import dense_product, packed_product
from attar.runtime.llm import LLM
from attar.runtime.runner.device.layout import DENSE, DeviceWeight
from attar.runtime.runner.device.linears import multiply
from attar.runtime.runner.device.runner import Device, register_kernels
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.step import StepInput, TokenSpan

MATRICES = ((4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (6144, 4096), (1024, 2048))
SMALL_MATRICES = ((64, 128), (96, 256))
WIDTHS = (2, 3, 4, 5, 6, 8)
SHAPES = {  # layers, hidden, heads, kv_heads, head_dim, neurons, vocabulary
    "1B": (16, 2048, 32, 8, 64, 8192, 128256),
    "8B": (32, 4096, 32, 8, 128, 14336, 128256),
    "small": (2, 256, 4, 2, 64, 512, 1024),
}
NEAR = 0.02  # of the largest result, in bfloat16


def weight(rows: int, columns: int, bits: int, device: str, group: int = 64) -> DeviceWeight:
    """Random; codes with zero points in the middle."""
    if bits == DENSE:
        return DeviceWeight(torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5)
    words = torch.randint(-(2**31), 2**31, (columns * bits // planes.WORD, rows), device=device).int()
    scales = torch.full((columns // group, rows), columns**-0.5 / 2 ** (bits - 1), device=device)
    return DeviceWeight(words, scales.half(), bits=bits)


def on_cpu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments)


def compare(name: str, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """A line; whether the device agrees with the body, and with itself."""
    result, again = operator(*arguments), operator(*arguments)
    wanted = operator(*on_cpu(arguments)).float()
    off = float((result.cpu().float() - wanted).abs().max() / wanted.abs().max())
    same = torch.equal(result, again)
    print(f"{name:<44} off by {off:.1e} of the largest, {'the same' if same else 'OTHER BITS'} twice")
    return off <= NEAR and same


def operators(device: str) -> bool:
    """The first part."""
    agrees, small = True, device == "cpu"
    for rows, columns in SMALL_MATRICES if small else MATRICES:
        for m in (1, 8, 64):
            x = torch.randn(m, columns, device=device, dtype=torch.bfloat16)
            for bits in WIDTHS:
                w = weight(rows, columns, bits, device)
                given = (x, w.data, w.scales, None, None, bits, torch.bfloat16)
                agrees &= compare(f"{bits} bits, {m} x {columns} x {rows}", packed_product, given)
            dense = weight(rows, columns, DENSE, device).data
            agrees &= compare(
                f"dense, {m} x {columns} x {rows}", dense_product, (x, dense, None, torch.bfloat16)
            )
    for length in (5, 300) if small else (5, 300, 4000):
        blocks, g, d = -(-length // 16), 2 if small else 8, 64
        keys, values = (torch.randn(blocks, 16, g, d, device=device).bfloat16() for _ in range(2))
        q = torch.randn(1, 4 * g, d, device=device, dtype=torch.bfloat16) * d**-0.5
        table = torch.randperm(blocks, device=device).int()[None]
        at = [
            torch.full((1,), value, device=device, dtype=torch.int32) for value in (0, length - 1, length, 0)
        ]
        tree = torch.zeros(1, 0, device=device, dtype=torch.int32)
        given = (q, keys, values, None, None, None, table, *at, tree, None, 0, 0.0)
        agrees &= compare(f"attention over {length} entries", paged_attention, given)
    return agrees


def seconds(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Of a call, mean; two calls before are not counted."""
    for _ in range(2):
        run()
    wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    wait(device)
    return (time.perf_counter() - began) / rounds


def wait(device: str) -> None:
    """Until the device has done its work."""
    if device != "cpu":
        torch.cuda.synchronize()


def products(device: str) -> bool:
    """The second part."""
    rows, columns = (256, 256) if device == "cpu" else (8192, 8192)
    rounds = 3 if device == "cpu" else 100
    for m in (1, 8, 64):
        x = torch.randn(m, columns, device=device, dtype=torch.bfloat16)
        dense = weight(rows, columns, DENSE, device)
        plain = seconds(lambda x=x, dense=dense: torch.nn.functional.linear(x, dense.data), device, rounds)
        print(
            f"{m} x {columns} x {rows}: bfloat16 {plain * 1e6:.0f} us, {dense.nbytes / plain / 1e9:.0f} GB/s"
        )
        for bits in WIDTHS:
            w = weight(rows, columns, bits, device)
            taken = seconds(lambda x=x, w=w: multiply(w, x), device, rounds)
            rate, ratio = w.nbytes / taken / 1e9, plain / taken
            print(f"    {bits} bits {taken * 1e6:.0f} us, {rate:.0f} GB/s, {ratio:.2f} times bfloat16")
    return True


def model(shape: str, bits: int, device: str, context: int) -> ModelWeights:
    """Random weights on the device."""
    layers, hidden, heads, kv_heads, d, neurons, vocabulary = SHAPES[shape]
    ones = torch.ones(hidden, device=device)
    angles = torch.rand(context, d // 2, device=device)
    rotary = torch.cat([angles.cos(), angles.sin()], dim=1)

    def layer() -> Any:
        parts: Any = {
            "qkv": weight((heads + 2 * kv_heads) * d, hidden, bits, device),
            "out": weight(hidden, heads * d, bits, device),
            "gate_up": weight(2 * neurons, hidden, bits, device),
            "down": weight(hidden, neurons, bits, device),
        }
        return LayerWeights(before_attention=ones, before_mlp=ones, rotary=rotary, **parts)

    head: Any = weight(vocabulary, hidden, DENSE, device)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": d}
    return ModelWeights(
        embedding=head.data,
        norm=ones,
        head=head,
        layers=tuple(layer() for _ in range(layers)),
        eps=1e-5,
        scale=d**-0.5,
        **sizes,
    )


def tokens_of(runner: Device, step: StepInput) -> torch.Tensor:
    """The most likely tokens, on the host."""
    return runner.run(step).argmax(1).cpu()


def steps(device: str) -> bool:
    """The third part."""
    small = device == "cpu"
    rounds, prompts = (3, (32,)) if small else (32, (512, 4096))
    for shape, bits in (
        (("small", DENSE), ("small", 4)) if small else (("1B", DENSE), ("8B", DENSE), ("8B", 4))
    ):
        batches = (1, 4) if small else (1, 64)
        weights = model(shape, bits, device, max(prompts) + 256)
        dtype = torch.float32 if small else torch.bfloat16
        blocks = max(batches[-1] * 16, -(-prompts[-1] // 16))
        runner = Device(weights, blocks=blocks, kv_dtype="bfloat16", dtype=dtype, device=device)
        name = f"{shape}, {runner.facts['weights']}"
        graphs = runner._program.graphs
        for batch in batches:
            for kind in (graphs, None) if graphs is not None else (None,):
                runner._program.graphs = kind
                spans = [TokenSpan(n, 128, 129, tuple(range(16 * n, 16 * n + 16)), 1) for n in range(batch)]
                step = StepInput([1] * batch, tuple(spans))
                taken = seconds(partial(tokens_of, runner, step), device, rounds)
                how = "without graphs" if kind is None else "graphs"
                print(f"{name}: decode of {batch}, {how}: {taken * 1e3:.2f} ms, {batch / taken:.0f} tokens/s")
        for prompt in prompts:
            span = TokenSpan(0, 0, prompt, tuple(range(-(-prompt // 16))), 1)
            step = StepInput([1] * prompt, (span,))
            taken = seconds(partial(tokens_of, runner, step), device, 2)
            print(f"{name}: a prompt of {prompt}: {taken * 1e3:.1f} ms, {prompt / taken:.0f} tokens/s")
    return True


def answers(device: str) -> bool:
    """The fourth part. In bfloat16 a text may part from the CPU's; what is counted is where."""
    prompts = ["def add(a, b):", "The ", "class "]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    agreed = total = 0
    for weights in (None, "int4"):
        options: dict[str, Any] = {"weights": weights, "kv_tokens": 512}
        wanted = LLM("attar:tiny", **options).generate(prompts, params)
        got = LLM("attar:tiny", runner="device", device=device, **options).generate(prompts, params)
        for first, second in zip(wanted, got, strict=True):
            pairs = list(zip(first.token_ids, second.token_ids, strict=True))
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
            agreed, total = agreed + same, total + len(pairs)
    print(f"{agreed} of {total} greedy tokens before the first difference")
    return agreed == total if device == "cpu" else agreed > 0


PARTS = {"operators": operators, "products": products, "steps": steps, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device != "cpu":
        register_kernels(torch.device(options.device))
    with torch.no_grad():
        sys.exit(not PARTS[options.part](options.device))


if __name__ == "__main__":
    main()
