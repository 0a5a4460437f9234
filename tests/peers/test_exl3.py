"""EXL3 files as GPTQModel's torch kernel decodes them, in the environment ``$ATTAR_PEERS/gptqmodel``
(benchmarks/peers/environments.py builds it): decode_exl3.py."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attar.formats.readers import reader
from tests.formats.test_exl3 import GOLDEN, save_exl3

PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "gptqmodel" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no GPTQModel: set ATTAR_PEERS", allow_module_level=True)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def run(verb, file):
    subprocess.run([str(PYTHON), str(Path(__file__).parent / "decode_exl3.py"), verb, str(file)], check=True)


def same_as_gptqmodel(checkpoint):
    """Every weight equal bit for bit, but for what fills it up."""
    file = checkpoint.path / "model.safetensors"
    run("decode", file)
    wanted = load_file(f"{file}.decoded")
    read = reader(checkpoint)
    assert len(wanted) > 7
    for name, weight in wanted.items():
        got = read.decode(f"{name.removesuffix('weight')}trellis")
        assert torch.equal(got, weight[: got.shape[0], : got.shape[1]].half())


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2), ("mcg", 3), ("3inst", 5)])
def test_weights_are_gptqmodels(tmp_path, codebook, bits):
    same_as_gptqmodel(save_exl3(tmp_path / "exl3", codebook, bits)[0])


def test_the_golden_hashes_are_its_own(tmp_path):
    run("golden", tmp_path / "golden.json")
    assert json.loads((tmp_path / "golden.json").read_text()) == GOLDEN
