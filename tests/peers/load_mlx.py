"""Runs in the environment of mlx-lm: loads MLX folders as its users do, and writes down what it got.

    python load_mlx.py JOB.json

``mlx_lm.convert`` makes a folder of each of ``convert`` first. For each folder of the job:
``FOLDER/logits.npy`` for the job's tokens, ``FOLDER/generated.json`` the greedy tokens that follow them; a
list of errors (null where there was none) on the output. ``weight`` is a matrix that ``mx.quantize`` rounds
as each of ``rules`` says; what it loses follows the errors.
"""

import contextlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.convert import convert as mlx_convert
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def run(folder, tokens, new):
    """Logits and greedy tokens of a folder."""
    model, _ = load_model(folder)
    logits = model(mx.array([tokens])).astype(mx.float32)
    np.save(folder / "logits.npy", np.array(logits[0]))
    steps = generate_step(mx.array(tokens), model, max_tokens=new)
    (folder / "generated.json").write_text(json.dumps([int(token) for token, _ in steps]))


def convert(**options):
    """mlx_lm.convert, whose own output is no part of this script's."""
    with contextlib.redirect_stdout(sys.stderr):
        mlx_convert(**options)


def lost(weight, rule):
    """The relative error of mx.quantize."""
    parts = mx.quantize(weight, rule["group_size"], rule["bits"], rule["mode"])
    back = mx.dequantize(*parts, **rule, dtype=mx.float32)
    return float(mx.linalg.norm(back - weight) / mx.linalg.norm(weight))


def main():
    """Do the job; an error in one folder is written down and the others go on."""
    mx.set_default_device(mx.cpu)
    job, errors = json.loads(Path(sys.argv[1]).read_text()), []
    for options in job["convert"]:
        convert(**options)
    for folder in job["folders"]:
        try:
            run(Path(folder), job["tokens"], job["new"])
            errors.append(None)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    weight = mx.array(np.load(job["weight"]))
    print(json.dumps([errors, [lost(weight, rule) for rule in job["rules"]]]))


main()
