"""One model at several widths: bytes, KL to the original, next tokens kept.

python examples/compare_bits.py MODEL OUT [--schemes W8A16 W4A16 W3A16]
"""

import argparse
from pathlib import Path

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--schemes", nargs="+", default=["W8A16", "W4A16", "W3A16"])
parser.add_argument("--samples", type=int, default=128, help="rows of calibration text")
args = parser.parse_args()

print(f"{'scheme':8} {'MB':>8} {'KL':>8} {'kept':>7}")
for scheme in args.schemes:
    small = attar.quantize(args.model, args.out / scheme, scheme=scheme, samples=args.samples)
    found = attar.evaluate(small, reference=args.model, tokens=2048, speed=False, sample="")
    print(f"{scheme:8} {found.bytes / 1e6:8.1f} {found.kl_mean:8.4f} {100 * found.quality_kept:6.1f}%")
