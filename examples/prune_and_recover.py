"""Fewer neurons, then training, then 4 bits: a recipe in Python.

python examples/prune_and_recover.py MODEL OUT [--ratio 0.2] [--steps 200]
"""

import argparse
from pathlib import Path

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--ratio", type=float, default=0.2, help="of the neurons that go")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--samples", type=int, default=128, help="rows of calibration text")
parser.add_argument("--length", type=int, default=256, help="tokens of a row")
args = parser.parse_args()

rows = {"samples": args.samples, "sequence_length": args.length}
pruned = attar.prune(args.model, args.out / "pruned", method="neurons", ratio=args.ratio, **rows)
recovered = attar.recover(
    pruned, args.out / "recovered", teacher=args.model, steps=args.steps, sequence_length=args.length
)
small = attar.quantize(recovered, args.out / "w4", scheme="W4A16", **rows)
for name, model in (("pruned", pruned), ("recovered", recovered), ("4 bits", small)):
    found = attar.evaluate(model, reference=args.model, tokens=2048, speed=False, sample="")
    print(f"{name:10} {found.bytes / 1e6:7.1f} MB, KL {found.kl_mean:.4f}")
