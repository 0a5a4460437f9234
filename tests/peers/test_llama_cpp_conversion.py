"""Exports to GGUF beside llama.cpp's own converter (convert_to_gguf.py): the same tensors, bit for bit, and
the same metadata of the architecture.

Needs the source of llama.cpp, ``$ATTAR_PEERS/llama-server`` (benchmarks/peers/environments.py), and no build.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.formats.gguf.container import read_gguf
from tests import tiny_models, tiny_mtp
from tests.formats.gguf import variants
from tests.formats.gguf.variants import VARIANTS, build

HOME = Path(os.environ.get("ATTAR_PEERS", "/nowhere")) / "llama-server"
SOURCES = sorted(HOME.glob("llama_cpp_python-*/vendor/llama.cpp"))
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SOURCES, reason="no source of llama.cpp under $ATTAR_PEERS/llama-server"),
]
FAMILIES = ("lfm2", "lfm2_moe", "mamba2", "granitemoehybrid", "falcon_h1", "llama4", "qwen3_next")
FAMILIES += ("qwen3_5", "qwen3_5_moe", "gemma3n", "gemma4")
OTHER = {  # keys that attar means otherwise: the config's own context; what llama.cpp does not read
    "granitehybrid.context_length",
    "granitehybrid.rope.dimension_count",
    "granitehybrid.rope.freq_base",
    "qwen35moe.feed_forward_length",
}


def convert(folder, file, *options):
    """The file that llama.cpp's converter makes of a folder."""
    script = Path(__file__).with_name("convert_to_gguf.py")
    command = [sys.executable, str(script), str(SOURCES[0]), str(folder), "--outfile", str(file)]
    done = subprocess.run(
        [*command, "--outtype", "f32", *options], capture_output=True, text=True, check=False, cwd=file.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_gguf(file)


@pytest.mark.parametrize(
    "variant",
    [
        name
        for name, (family, _) in VARIANTS.items()
        if family in FAMILIES and name != "gemma3n with shared keys"  # as published, below
    ],
)
def test_file_is_the_converters(tmp_path, variant):
    folder = tiny_models.save(build(variant), tmp_path / "model")
    if VARIANTS[variant][0] == "granitemoehybrid":  # as its published config names them
        path = folder / "config.json"
        text = path.read_text().replace('"linear_attention"', '"mamba"')
        path.write_text(text.replace('"full_attention"', '"attention"'))
    check_alike(folder, tmp_path, *["--no-mtp"] * VARIANTS[variant][0].startswith("qwen3"))


@pytest.mark.parametrize("variant", variants.PUBLISHED)
def test_what_published_checkpoints_have_is_the_converters(tmp_path, variant):
    folder = variants.published(variant, tiny_models.save(build(variant), tmp_path / "model"))
    check_alike(folder, tmp_path, *["--no-mtp"] * VARIANTS[variant][0].startswith("qwen3"))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_blocks_that_predict_further_tokens_are_the_converters(tmp_path, family):
    check_alike(tiny_mtp.save(family, tmp_path / "model"), tmp_path)


def check_alike(folder, tmp_path, *options):
    """attar's file of a folder has the tensors and keys of the converter's."""
    export(folder, tmp_path / "own.gguf", ExportSettings(format="gguf", type="F32"))
    own, theirs = read_gguf(tmp_path / "own.gguf"), convert(folder, tmp_path / "theirs.gguf", *options)
    assert own.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        first, second = own.load(name), theirs.load(name)
        assert first.dtype == second.dtype and torch.equal(first, second), name
    prefix = f"{theirs.metadata['general.architecture']}."
    for key, value in theirs.metadata.items():
        if key.startswith(prefix) and key not in OTHER:
            assert own.metadata[key] == value, key
