"""How far estimates are from what stages take: recipes of attar:tiny, run for real.

    python benchmarks/estimates.py                      # rtn, gptq, prune, recover: some minutes on two cores
    python benchmarks/estimates.py --model ORG/NAME     # of another model

Prints, for each stage, the estimate before the run, the time, and estimate over time; and the same with the
estimate made when the stages before were done (a run's own line "starts, about ...").
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from attar.checkpoint.open import open_checkpoint
from attar.recipe.plan import error_factor, make_plan
from attar.recipe.receipts import read_receipt
from attar.recipe.run import run_recipe
from attar.recipe.schema import parse_recipe
from attar.recipe.table import table

STAGES = """
  - {stage: quantize, name: rtn, method: rtn, from: original}
  - {stage: quantize, name: gptq-16, method: gptq, samples: 16, from: original}
  - {stage: quantize, name: gptq-64, method: gptq, samples: 64, from: original}
  - {stage: prune, name: neurons, method: neurons, ratio: 0.25, from: original}
  - {stage: recover, name: recover-10, steps: 10, from: neurons, teacher: original}
  - {stage: recover, name: recover-20, steps: 20, from: neurons, teacher: original}
"""


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--data", default="python-stdlib")
    arguments = parser.parse_args()
    head = f"model: {arguments.model}\ndata: {arguments.data}\nevaluate: false\nstages:"
    recipe = parse_recipe(head + STAGES.replace("method: ", "group_size: -1, method: ", 3))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        before = make_plan(recipe, out, open_checkpoint(recipe.model))
        run_recipe(recipe, out)
        for step in before.steps:
            receipt = read_receipt(out, step.entry.folder)
            assert receipt is not None, step.entry.name
            told = step.estimate.seconds
            others = error_factor(recipe, out, step.entry, without=step.entry.folder) * step.estimate.plain
            rows.append(
                (
                    step.entry.name,
                    f"{told:.1f}",
                    f"{receipt.seconds:.1f}",
                    f"{told / receipt.seconds:.2f}",
                    f"{others / receipt.seconds:.2f}",
                )
            )
    print(table(("stage", "estimate, s", "time, s", "ratio", "ratio after the others"), rows))


if __name__ == "__main__":
    main()
