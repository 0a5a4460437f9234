"""Mixtures of dense models against ``mergekit-moe`` itself: every tensor, and what the configs say.

mergekit runs the base model in bfloat16, so rows made of hidden states agree to its precision; all else has
the same numbers. It stacks the experts of Mixtral and Qwen3: both results are compared as transformers reads
them.
"""

import json
import subprocess

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import attar
from tests import tiny_models
from tests.peers.mergekit_peer import MISSING, PYTHON

pytestmark = [pytest.mark.peers, pytest.mark.skipif(MISSING, reason="mergekit's environment is not built")]

RUN = """
import json, sys, yaml
from mergekit.merge import MergeOptions
from mergekit.moe.config import MoEMergeConfig
from mergekit.scripts.moe import build
for text, out in json.load(sys.stdin):
    build(MoEMergeConfig.model_validate(yaml.safe_load(text)), out, MergeOptions(), device="cpu")
"""
SHARED = {"source_model": "TWO", "residual_scale": 0.5}
CASES = {
    "mixtral": ("smollm", {}),
    "mistral": ("mistral", {"gate_mode": "cheap_embed"}),
    "last": ("llama3", {"gate_mode": "hidden_last", "experts_per_token": 1}),
    "qwen2": ("qwen2", {"shared_experts": [{**SHARED, "positive_prompts": ["x = 1"]}]}),
    "qwen of llama": (
        "smollm",
        {"shared_experts": [{**SHARED, "positive_prompts": ["x"]}], "gate_mode": "cheap_embed"},
    ),
    "qwen3": ("qwen3", {}),
    "deepseek": ("smollm", {"shared_experts": [SHARED], "gate_mode": "cheap_embed"}),
}
SAME = (
    *("num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts", "scoring_func"),
    *("intermediate_size", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "model_type"),
)


def document(**changes):
    experts = [
        {
            "source_model": "ONE",
            "positive_prompts": ["def main():", "import os"],
            "negative_prompts": ["Dear"],
        },
        {"source_model": "TWO", "positive_prompts": ["Dear Sir"], "residual_scale": 0.5},
    ]
    return {"base_model": "BASE", "dtype": "float32", "experts": experts, **changes}


def test_mixtures_are_mergekits(tmp_path):
    runs, ours = [], {}
    for case, (family, changes) in CASES.items():
        text = yaml.safe_dump(document(**changes))
        for seed, name in enumerate(("BASE", "ONE", "TWO")):
            folder = tiny_models.save(tiny_models.build(family, seed=seed), tmp_path / case / name)
            text = text.replace(f"model: {name}\n", f"model: {folder}\n")
        theirs = tmp_path / case / "theirs"
        theirs.mkdir()
        runs.append((text, str(theirs)))
        ours[case] = attar.merge(text, tmp_path / case / "ours").path
    command = [str(PYTHON), "-c", RUN]
    ended = subprocess.run(command, input=json.dumps(runs), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for case, folder in ours.items():
        configs = [
            json.loads((path / "config.json").read_text()) for path in (folder, folder.parent / "theirs")
        ]
        for key in SAME:
            assert configs[0].get(key) == configs[1].get(key), (case, key)
        mine, other = (tensors(path, case) for path in (folder, folder.parent / "theirs"))
        assert set(mine) == set(other), case
        exact = CASES[case][1].get("gate_mode") == "cheap_embed"
        for name, tensor in mine.items():
            bound = 0 if "gate.weight" not in name else 1e-6 if exact else 0.03
            torch.testing.assert_close(tensor, other[name], atol=bound, rtol=0, msg=f"{case}: {name}")


def tensors(folder, case):
    if case == "deepseek":
        return load_file(folder / "model.safetensors")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
