"""A student of half the layers learns from its teacher.

python examples/half_the_layers.py MODEL OUT [--steps 300]
"""

import argparse
from pathlib import Path

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--length", type=int, default=256, help="tokens of a row")
args = parser.parse_args()

layers = attar.open_checkpoint(args.model).config["num_hidden_layers"] // 2
student = attar.distill(
    args.model, args.out / "student", layers=layers, steps=args.steps, sequence_length=args.length
)
found = attar.evaluate(student, reference=args.model, tokens=2048, speed=False, sample="")
print(f"{layers} layers, {found.parameters / 1e6:.1f} M parameters, {100 * found.quality_kept:.1f} % kept")
