"""Multi-token prediction heads of quantized folders in the own config code of vLLM and SGLang: a Linear that
is stored as codes gets a quantized method, one that is stored dense none (load_served_mtp.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.formats.readers import Decoded
from attar.verbs import export, quantize
from tests import tiny_mtp
from tests.peers.test_served_linears import ENGINES

pytestmark = pytest.mark.peers

DENSE_MLP = {"mlp.gate_up_proj": "mlp.up_proj", "mlp.down_proj": "mlp.down_proj"}
QKV = {"self_attn.qkv_proj": "self_attn.q_proj", "self_attn.o_proj": "self_attn.o_proj"}
EXPERTS = {"mlp.experts.0.gate_proj": "mlp.experts.0.gate_proj"}
SHARED = {"mlp.shared_experts.gate_up_proj": "mlp.shared_experts.up_proj"}
MLA = {"self_attn.fused_qkv_a_proj": "self_attn.q_a_proj", "self_attn.kv_b_proj": "self_attn.kv_b_proj"}
GATES = {"mlp.gate": "mlp.gate", "mlp.shared_expert_gate": "mlp.shared_expert_gate"}
SPELLINGS = {  # engine and family: its prefix of the block, merged names known, its names and one stored part
    ("vllm", "deepseek_v3"): ("model.layers.3", False, {**MLA, **EXPERTS, **SHARED}),
    ("vllm", "glm4_moe"): ("model.layers.3", False, {**QKV, **EXPERTS, **SHARED}),
    ("vllm", "qwen3_next"): (
        "mtp.layers.0",
        True,
        {**QKV, **EXPERTS, **GATES},
    ),
    ("vllm", "qwen2"): ("model.layers.3", False, {**QKV, **DENSE_MLP}),
    ("vllm", "llama2"): ("model.layers.3", False, {**QKV, **DENSE_MLP}),
    ("sglang", "deepseek_v3"): ("model.decoder", False, {**MLA, **EXPERTS, **SHARED}),
    ("sglang", "glm4_moe"): ("model.decoder", False, {**QKV, **EXPERTS, **SHARED}),
}
FORMATS = {  # scheme, format of the export, whether the block is stored as codes
    "compressed-tensors": ("W4A16", "", True),
    "left dense": ("W4A16", "", False),
    "gptq": ("W4A16", "gptq", False),
    "awq": ("W4A16_ASYM", "awq", False),
    "modelopt": ("FP8_DYNAMIC", "modelopt", True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every family in every format."""
    home = tmp_path_factory.mktemp("folders")
    made = {}
    for family in tiny_mtp.HEADS:
        base = tiny_mtp.save(family, home / family, dtype=torch.bfloat16)
        for name, (scheme, target, coded) in FORMATS.items():
            out = home / f"{family} {name}"
            options = {} if scheme.startswith("FP8") else {"group_size": 32}
            options |= {"ignore": [r"re:mtp|layers\.3\."]} if name == "left dense" else {}
            written = quantize(base, out, method="rtn", scheme=scheme, check_tokens=0, **options)
            if target:
                out = out.with_name(f"{out.name} exported")
                written = export(written, out, format=target)
            assert any(map(Decoded(written.with_mtp).is_coded, open_checkpoint(base).mtp)) == coded
            made[family, name] = out
    return made


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_is_loaded_as_it_is_stored(engine, folders):
    if not ENGINES[engine].exists():
        pytest.skip(f"no {engine}-wheel: set ATTAR_PEERS")
    cases = [
        (family, name, folder)
        for (family, name), folder in folders.items()
        if (engine, family) in SPELLINGS and not (engine == "sglang" and name == "modelopt")
    ]
    asked = []
    for family, _, folder in cases:
        prefix, merged, parts = SPELLINGS[engine, family]
        asked.append([str(folder), merged, [f"{prefix}.{part}" for part in parts]])
    wrong = []
    for (family, name, folder), answers in zip(cases, answers_of(engine, asked), strict=True):
        prefix, _, parts = SPELLINGS[engine, family]
        decoded, block = Decoded(open_checkpoint(folder).with_mtp), tiny_mtp.block_name(family, 3)
        for part, stored in parts.items():
            coded = decoded.is_coded(f"{block}.{stored}.weight")
            if answers[f"{prefix}.{part}"] != coded:
                wrong.append((family, name, part, coded))
    assert wrong == []


def answers_of(engine, asked):
    script = Path(__file__).with_name("load_served_mtp.py")
    command = [sys.executable, str(script), str(ENGINES[engine]), engine, json.dumps(asked)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])
