"""What each rounding costs and keeps on the embedded model, side by side in one run.

    python benchmarks/compression.py [MODEL] [--samples 128] [--tokens 65536]

Every row quantizes the same checkpoint and is measured on the same held-out tokens against it: KL to the
original in nats per token, top-1 agreement, bits per weight (scales included, embedding not quantized),
seconds of the call. The rounds of timing are interleaved; the smallest is printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from attar.checkpoint import open_checkpoint
from attar.measure.evaluate import evaluate
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize

ROWS = [
    (scheme, group, method, act_order)
    for scheme, group in (("W8A16", 128), ("W4A16", 128), ("W4A16", 64), ("W4A16", 32))
    for method, act_order in (("rtn", "static"), ("gptq", "off"), ("gptq", "static"))
]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="attar:tiny")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    model = open_checkpoint(args.model)
    settings = EvaluateSettings(tokens=args.tokens, speed=False, sample="", runner="transformers")
    reference = make_reference(model, settings, memory_limit=2**31)
    seconds: dict[tuple[object, ...], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for row in ROWS:
                scheme, group, method, act_order = row
                own = {} if method == "rtn" else {"act_order": act_order}
                chosen = quantize_settings(
                    scheme=scheme, group_size=group, method=method, samples=args.samples, **own
                )
                out = Path(folder) / f"{scheme}-{group}-{method}-{act_order}"
                start = time.perf_counter()
                quantize(model, out, chosen, force=round_ > 0)
                seconds[row] = min(seconds.get(row, 1e9), time.perf_counter() - start)
        print(f"{model.name}, {args.samples} x 512 calibration tokens, {args.tokens} held-out tokens")
        print(
            f"{'scheme':<8}{'group':>6}  {'method':<16}{'bits/w':>8}{'KL':>11}{'KL p99':>10}"
            f"{'top-1':>8}{'seconds':>9}"
        )
        for row in ROWS:
            scheme, group, method, act_order = row
            measured = evaluate(
                Path(folder) / f"{scheme}-{group}-{method}-{act_order}", settings, reference=reference
            )
            name = method if method == "rtn" else f"gptq{' act-order' if act_order == 'static' else ''}"
            print(
                f"{scheme:<8}{group:>6}  {name:<16}{measured.bits_per_weight:>8.2f}{measured.kl_mean:>11.2e}"
                f"{measured.kl_p99:>10.2e}"
                f"{measured.top1_agreement:>8.3f}{seconds[row]:>9.1f}"
            )


if __name__ == "__main__":
    main()
