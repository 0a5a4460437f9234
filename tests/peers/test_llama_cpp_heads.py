"""Exported draft heads in llama.cpp's own converter (convert_to_gguf.py).

Needs the source of llama.cpp, ``$ATTAR_PEERS/llama-server`` (benchmarks/peers/environments.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.formats.gguf.container import read_gguf
from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.models.draft_heads.folder import DRAFT_HEADS, save_draft_head

HOME = Path(os.environ.get("ATTAR_PEERS", "/nowhere")) / "llama-server"
SOURCES = sorted(HOME.glob("llama_cpp_python-*/vendor/llama.cpp"))
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SOURCES, reason="no source of llama.cpp under $ATTAR_PEERS/llama-server"),
]
SIZES = {"depth": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 96, "rope_theta": 5000.0}
SHAPE, LLAMA = DraftLayerShape(**SIZES), DraftLayerShape(**SIZES, head_norms=False)
REDUCED = {"draft_vocabulary": 64}
KINDS = {
    "dspark": {"layers": (0, 6), "shape": SHAPE, "markov_rank": 8, "confidence": True, **REDUCED},
    "dflash": {"layers": (0, 6), "shape": SHAPE},
    "eagle3": {"layers": (0, 1, 6), "shape": LLAMA, **REDUCED},
}
EXPECTED = {
    "dspark": {
        "dflash.block_size": 4,
        "dflash.target_layers": [1, 7],
        "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": True,
        "dflash.rope.freq_base": 5000.0,
    },
    "dflash": {"dflash.block_size": 5, "dflash.target_layers": [1, 7]},
    "eagle3": {"eagle3.target_layers": [1, 2, 7], "eagle3.norm_before_residual": False},
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dspark", "deepspec"),
        ("dspark", "speculators"),
        ("dflash", "deepspec"),
        ("eagle3", "eagle"),
        ("eagle3", "speculators"),
    ],
)
def test_llama_cpp_converts_an_exported_head(tmp_path, kind, layout):
    config, module = DRAFT_HEADS[kind]
    head = module(config(hidden=256, vocabulary=2048, drafts=4, **KINDS[kind]))
    chosen = torch.randperm(2048)[:64].sort().values
    if "draft_vocabulary" in KINDS[kind]:
        head.d2t.copy_(chosen - torch.arange(64))
    (tmp_path / "head").mkdir()
    save_draft_head(head, tmp_path / "head", target="attar:tiny")
    export(tmp_path / "head", tmp_path / "out", ExportSettings(format=layout))
    convert(tmp_path / "out", tmp_path / "head.gguf")
    written = read_gguf(tmp_path / "head.gguf")
    for key, value in EXPECTED[kind].items():
        got = written.metadata[key]
        assert (list(got) if isinstance(value, list) else got) == value
    assert len(written.tensors) == len(head.state_dict())  # a mask is a row of token_embd
    if "draft_vocabulary" in KINDS[kind]:
        assert "d2t" in written.tensors


def convert(folder, file):
    target = open_checkpoint("attar:tiny").path
    script = Path(__file__).with_name("convert_to_gguf.py")
    command = [sys.executable, str(script), str(SOURCES[-1]), str(folder), "--outtype", "bf16"]
    command += ["--target-model-dir", str(target), "--outfile", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
