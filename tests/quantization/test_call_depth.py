"""From the verb to the arithmetic of GPTQ there are at most seven calls."""

import json
import sys
from pathlib import Path

import torch

import attar
from attar.quantization import columns
from attar.quantization.methods import gptq
from tests import tiny_models

MOST = 7
TEXT = str(Path(json.__file__).parent)


def test_quantize_reaches_the_loop_of_gptq_in_seven_calls(tmp_path, monkeypatch):
    """The calls below ``attar.quantize`` down to ``round_columns_``, which counts as one. Frames of other
    packages (torch, context managers of the standard library) do not count."""
    source = tiny_models.save(tiny_models.build("llama3"), tmp_path / "dense", dtype=torch.bfloat16)
    depths = []
    round_columns_ = columns.round_columns_

    def counted(*args, **kwargs):
        frame, names = sys._getframe(1), ["round_columns_"]
        while frame.f_code is not attar.quantize.__code__:
            if "attar" in Path(frame.f_code.co_filename).parts:
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        depths.append(names[::-1])
        return round_columns_(*args, **kwargs)

    monkeypatch.setattr(gptq, "round_columns_", counted)
    attar.quantize(
        source,
        tmp_path / "out",
        method="gptq",
        samples=2,
        sequence_length=16,
        group_size=32,
        check_tokens=0,
        data=TEXT,
    )
    assert depths and max(map(len, depths)) <= MOST, depths[0]
