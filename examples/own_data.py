"""Calibrate and measure on texts of your own: a file with one document a line.

python examples/own_data.py MODEL OUT TEXTS.txt
"""

import argparse
from pathlib import Path

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("texts", type=Path)
parser.add_argument("--samples", type=int, default=128, help="rows of calibration text")
args = parser.parse_args()

texts = [line for line in args.texts.read_text().splitlines() if line.strip()]
small = attar.quantize(args.model, args.out / "w4", scheme="W4A16", data=texts, samples=args.samples)
# the same texts: the calibration read a part of them, the evaluation reads another
found = attar.evaluate(small, reference=args.model, data=texts, tokens=1024, speed=False, sample="")
print(f"KL to the original {found.kl_mean:.4f} nats a token, on {found.tokens} tokens that were not read")
