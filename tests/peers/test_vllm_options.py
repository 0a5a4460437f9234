"""Options that ``attar serve --engine vllm`` gives, read by vLLM's own parser (load_vllm_options.py), and its
names of caches, methods and parsers; folders that its own code loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.serving.http.settings import LoraSettings, TemplateSettings
from attar.serving.http.vllm.flags import HEADS, KV_TYPES, REASONING, TOOLS
from attar.serving.http.vllm.loads import check_loads
from attar.serving.http.vllm.process import Vllm
from attar.verbs import quantize
from tests import tiny_models
from tests.serving.http.vllm.commands import options

FILES = Path(os.environ.get("ATTAR_PEERS", "/nonexistent")) / "vllm-wheel" / "0.33.0"
if not FILES.exists():
    pytest.skip("no vllm-wheel: set ATTAR_PEERS", allow_module_level=True)
pytestmark = pytest.mark.peers


def read(*lines):
    script = Path(__file__).with_name("load_vllm_options.py")
    process = subprocess.run(
        [sys.executable, str(script), str(FILES)],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_vllm_reads_every_option(tmp_path):
    tiny_models.save(tiny_models.build("llama2", max_position_embeddings=128), tmp_path / "llama")
    model = open_checkpoint(tmp_path / "llama")
    engines = [{"kv_dtype": name} for name in KV_TYPES]
    engines += [{"speculate": name, "drafts": 3} for name in ("ngram", "mtp", "suffix")]
    engines += [
        {"dtype": "bfloat16", "kv_tokens": 99, "sequences": 9, "step_tokens": 99, "prefix_cache": "on"}
    ]
    lines = [options(model, engine) for engine in engines]
    answers = TemplateSettings(chat_template="t.jinja", generation_config="none", tool_parser="hermes")
    lora = LoraSettings(lora=("a=/b", "c=/d"), max_loras=2)
    last = options(model, {"prefix_cache": "off"}, parts={"lora": lora, "answers": answers}, priority=True)
    *results, whole = read(*([*line, "--uds", "/x"] for line in [*lines, last]))
    assert not any("error" in result for result in (*results, whole)), results
    caches = [result["kv_cache_dtype"] for result in results[: len(KV_TYPES)]]
    assert caches == [name or "auto" for name in KV_TYPES.values()]
    methods = [result["speculative_config"]["method"] for result in results[len(KV_TYPES) : -1]]
    assert methods == ["ngram", "mtp", "suffix"]
    sized = results[-1]
    assert (sized["block_size"], sized["num_gpu_blocks_override"], sized["max_model_len"]) == (16, 7, 99)
    assert (sized["max_num_seqs"], sized["max_num_batched_tokens"]) == (9, 99)
    assert (sized["dtype"], sized["enable_prefix_caching"]) == ("bfloat16", True)
    assert (whole["uds"], whole["served_model_name"]) == ("/x", ["org/model"])
    assert (whole["enable_prefix_caching"], whole["enable_lora"], whole["max_loras"]) == (False, True, 2)
    assert (whole["scheduling_policy"], whole["generation_config"]) == ("priority", "vllm")
    assert (whole["chat_template"], whole["tool_call_parser"]) == ("t.jinja", "hermes")


def test_vllm_refuses_what_it_does_not_have():
    unknown, wrong = read(["m", "--no-such-option"], ["m", "--max-num-seqs", "nine"])
    assert "no-such-option" in unknown["error"] and "nine" in wrong["error"]


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("tool_parsers/__init__.py", TOOLS.values()),
        ("reasoning/__init__.py", (*REASONING.values(), "openai_gptoss")),
        ("config/cache.py", filter(None, KV_TYPES.values())),
        ("config/speculative.py", (*HEADS, "draft_model", "ngram", "suffix", "mtp")),
    ],
)
def test_vllm_has_the_names(file, names):
    quoted = re.findall(r'"([\w-]+)"', (FILES / "vllm" / file).read_text())
    assert {*names} <= {*quoted}


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM whose package is the wheel's."""
    monkeypatch.setenv("PYTHONPATH", str(FILES))
    return Vllm("/bin/vllm", sys.executable)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("dense") / "llama"
    tiny_models.save(tiny_models.build("llama2", **sizes), folder, dtype=torch.bfloat16)
    return folder


def test_a_folder_is_checked_by_vllms_own_code(vllm, dense, tmp_path):
    quantize(dense, tmp_path / "W4A16", method="rtn", scheme="W4A16", group_size=32, check_tokens=0)
    said = check_loads(open_checkpoint(tmp_path / "W4A16"), vllm)
    assert said == "compressed-tensors: 14 Linears by CompressedTensorsWNA16"
    assert check_loads(open_checkpoint(dense), vllm) == "dense"


def test_bits_that_few_kernels_have_are_said(vllm, dense, tmp_path):
    quantize(dense, tmp_path / "W3A16", method="rtn", scheme="W3A16", group_size=32, check_tokens=0)
    assert "packed codes of 4 or 8 bits" in check_loads(open_checkpoint(tmp_path / "W3A16"), vllm)
