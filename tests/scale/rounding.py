"""GPTQ and its kin in several processes."""

import os
from pathlib import Path

import torch

import attar
from attar.checkpoint.processes import rank
from tests import tiny_models

DATA = str(Path(torch.__file__).parent / "amp")
CASES = {
    "gptq": {"method": "gptq", "scheme": "W4A16", "group_size": 32, "scales": "absmax", "refine": 0},
    "gptaq": {"method": "gptaq", "scheme": "W4A16", "group_size": 32, "scales": "absmax", "refine": 0},
    "nvfp4": {"method": "gptq", "scheme": "NVFP4A16"},
    "awq": {"method": "awq", "scheme": "W4A16", "group_size": 32},
    "refined": {"method": "gptq", "scheme": "W4A16", "group_size": 32},
}
SIZES = {"samples": 6, "batch_size": 2, "sequence_length": 32, "precision": "fp32", "check_tokens": 0}


def quantize(target, out, case):
    """One case; its output folder."""
    return attar.quantize(str(target), str(Path(out) / case), data=DATA, **SIZES, **CASES[case])


def train(target, out):
    """Quantization-aware training."""
    options = {"method": "qat", "scheme": "W4A16", "group_size": 32, "steps": 4, "check_tokens": 0}
    sizes = {"samples": 4, "batch_size": 4, "sequence_length": 32, "precision": "fp32"}
    return attar.quantize(str(target), str(out), data=DATA, **options, **sizes)


def quantize_all(target, out):
    """Every case in every process."""
    for case in CASES:
        quantize(target, out, case)


def target(folder):
    """A small model to round."""
    return tiny_models.save(tiny_models.build("llama3"), folder)


def start_and_stop(target, out):
    """A quantization whose first process dies after two blocks; the other one hears of it."""
    from attar.walks import block_runner

    written, write = [], block_runner.write_solutions

    def dying(file, solutions):
        if len(written) == 2:
            raise KeyboardInterrupt
        write(file, solutions)
        written.append(file)

    block_runner.write_solutions = dying
    try:
        quantize(target, out, "gptq")
    except (KeyboardInterrupt, RuntimeError):
        os._exit(0)
    raise AssertionError("it did not stop")


def go_on(target, out, before):
    """The same one to its end, which writes no block that is there."""
    from attar.walks import block_runner

    written, write = [], block_runner.write_solutions
    block_runner.write_solutions = lambda file, solutions: (written.append(str(file)), write(file, solutions))
    quantize(target, out, "gptq")
    assert not set(written) & set(before)
    assert bool(written) == (not rank())
