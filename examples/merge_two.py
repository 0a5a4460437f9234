"""Two fine-tunes of one model as one, by TIES.

python examples/merge_two.py BASE FIRST SECOND OUT [--density 0.5]
"""

import argparse
from pathlib import Path

import yaml

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("base")
parser.add_argument("first")
parser.add_argument("second")
parser.add_argument("out", type=Path)
parser.add_argument("--density", type=float, default=0.5, help="share of each fine-tune's changes that stay")
args = parser.parse_args()

models = [{"model": model, "parameters": {"weight": 1.0}} for model in (args.first, args.second)]
config = {"merge_method": "ties", "base_model": args.base, "models": models}
config |= {"parameters": {"density": args.density}, "dtype": "bfloat16"}
args.out.mkdir(parents=True, exist_ok=True)
file = args.out / "merge.yml"
file.write_text(yaml.safe_dump(config))
merged = attar.merge(file, args.out / "merged")
print(attar.inspect(merged.path))
