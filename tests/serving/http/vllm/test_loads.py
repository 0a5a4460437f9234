"""What is said of a folder before vLLM starts, with packages that stand for vLLM's."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("fastapi")
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import ModelError
from attar.serving.http.vllm.loads import check_loads
from attar.serving.http.vllm.process import Vllm
from attar.verbs import quantize
from tests import tiny_models

VLLM = Vllm("/bin/vllm", sys.executable)
CONFIG = """class CompressedTensorsConfig:
    @classmethod
    def from_config(cls, config):
        {body}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense Llama, and the same in W3A16."""
    home = tmp_path_factory.mktemp("folders")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    tiny_models.save(tiny_models.build("llama2", **sizes), home / "dense", dtype=torch.bfloat16)
    quantize(home / "dense", home / "w3", method="rtn", scheme="W3A16", group_size=32, check_tokens=0)
    return {name: open_checkpoint(home / name) for name in ("dense", "w3")}


def package(folder, body, monkeypatch):
    """A package vllm whose config of compressed-tensors does something."""
    file = folder.joinpath("vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py")
    file.parent.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    file.write_text(CONFIG.format(body=body))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_dense_folder_needs_no_check(folders):
    assert check_loads(folders["dense"], VLLM) == "dense"


def test_what_vllms_code_refuses_is_one_line(folders, tmp_path, monkeypatch):
    package(tmp_path, "raise ValueError('no kernel has 3 bits')", monkeypatch)
    with pytest.raises(ModelError, match="vLLM does not load it: no kernel has 3 bits") as refused:
        check_loads(folders["w3"], VLLM)
    assert "leave out --engine vllm" in refused.value.hint


def test_code_that_is_read_otherwise_is_no_refusal(folders, tmp_path, monkeypatch):
    """Of another version, or without files."""
    assert check_loads(folders["w3"], VLLM).startswith("compressed-tensors, not checked: no package vllm")
    package(tmp_path, "return cls.moved_away(config)", monkeypatch)
    assert "not checked: this version is read otherwise (AttributeError" in check_loads(folders["w3"], VLLM)


def test_a_file_for_llama_cpp_is_refused(folders, tmp_path):
    from attar.verbs import export

    export(folders["dense"].path, tmp_path / "m.gguf", format="gguf", type="BF16")
    with pytest.raises(ModelError, match="vLLM loads no GGUF file"):
        check_loads(open_checkpoint(tmp_path / "m.gguf"), VLLM)
