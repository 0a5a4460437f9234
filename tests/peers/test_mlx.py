"""Exports to MLX in mlx-lm, on a CPU: its logits are those of attar's own decode, its greedy tokens too. And
folders that mlx-lm itself has quantized, read by attar.

mlx-lm runs in the environment ``$ATTAR_PEERS/mlx-lm`` (benchmarks/peers/environments.py builds it), in one
process for all folders: load_mlx.py. Weights are float32, so what is left is the order of sums.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.tensors import read_tensor
from attar.checkpoint.weight_files import read_tensors
from attar.deployment.mlx import MLXPlan, rounded
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.formats.mlx import MLXRule, decode, float_rule, layout
from attar.formats.readers import quant_method
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.models.loading.stored import stored_names
from tests import quantized_sources, tiny_models
from tests.quantization.packing import pack

PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "mlx-lm" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no mlx-lm: set ATTAR_PEERS", allow_module_level=True)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

TOKENS, NEW = list(range(40, 280, 10)), 12
GELU = ("gemma", "starcoder2", "gpt2")
"""Families whose GELU mlx-lm takes in another approximation."""
CHANGES = {  # windows that mlx-lm does not know are as wide as the context
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 64},
    "gemma3": {"num_hidden_layers": 6, "layer_types": None},
    "granite": {"intermediate_size": 128},  # mlx-lm has groups of 64 for some
    "granitemoe": {"intermediate_size": 128},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}},
}
FAMILIES = (
    *("llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gpt2"),
    *("smollm3", "ministral3", "seed_oss", "granite", "olmo2", "starcoder2", "stablelm"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss", "granitemoe"),
)
ROUNDED = {  # what a dense checkpoint is rounded to: family, settings
    **{family: (family, {"bits": 4, "group_size": 32}) for family in FAMILIES},
    **{f"{bits} bits": ("llama3", {"bits": bits, "group_size": 32}) for bits in (2, 3, 5, 6, 8)},
    "groups of 64": ("smollm", {}),
    "mxfp4": ("qwen3", {"type": "mxfp4"}),
    "nvfp4": ("mixtral", {"type": "nvfp4"}),
    "mxfp8": ("llama3", {"type": "mxfp8"}),
}
CONVERTED = {  # what mlx_lm.convert quantizes: family, its options
    **{f"converted {family}": (family, {"q_group_size": 32}) for family in FAMILIES},
    **{f"converted {mode}": ("qwen3_moe", {"q_mode": mode}) for mode in ("mxfp4", "nvfp4", "mxfp8")},
    **{f"converted to {bits}": ("llama3", {"q_bits": bits, "q_group_size": 64}) for bits in (2, 3, 5, 6, 8)},
}
CARRIED = {  # codes of a quantized checkpoint: family, scheme, settings of the export
    **{scheme: ("llama3", scheme, {}) for scheme in ("W2A16", "W3A16", "W4A16", "W4A16_ASYM", "W8A16")},
    "MXFP4A16": ("qwen3", "MXFP4A16", {}),
    "carried experts": ("qwen3_moe", "W4A16", {}),
    "carried gpt2": ("gpt2", "W4A16", {}),
    "embedding too": ("smollm", "W3A16", {"bits": 6, "group_size": 64}),
}
RULES = [*(MLXRule("affine", bits, 64) for bits in (2, 3, 4, 6)), float_rule("mxfp4"), float_rule("nvfp4")]
WEIGHT = torch.randn((256, 512), generator=torch.Generator().manual_seed(0)) * 0.02


def decoded(source, exported, settings):
    """The logits and greedy tokens of the source with the weights that the export's matrices decode to."""
    model = load_model(source, dtype=torch.float32)
    plan = MLXPlan(source, settings)
    model, written = unstack(model), read_tensors(exported.path)[0]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    module_of = {stored: name for name, stored in stored_names(model, plan.view).items()}
    for matrix in plan.matrices:
        if matrix.rule is None:
            continue
        leaves = layout(matrix.shape, matrix.rule, "F32")
        stored = {leaf: read_tensor(written[f"{matrix.name}.{leaf}"]) for leaf in leaves}
        for number, part in enumerate(matrix.parts):
            tensors = {leaf: value[number] if matrix.stacked else value for leaf, value in stored.items()}
            weight = decode(tensors, matrix.rule)
            parameters[module_of[part]].data.copy_(weight.T if matrix.transposed else weight)
    return answers(model)


def answers(model):
    """Logits of TOKENS, and the greedy tokens behind them."""
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        first = model(input_ids=tokens).logits[0].numpy()
        for _ in range(NEW):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    return first, tokens[0, len(TOKENS) :].tolist()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By case: mlx-lm's error, logits and tokens, and attar's."""
    root, wanted = tmp_path_factory.mktemp("mlx"), {}
    for name, (family, *scheme, changes) in {**ROUNDED, **CARRIED}.items():
        settings, folder = ExportSettings(format="mlx", **changes), root / name
        source = open_checkpoint(
            tiny_models.save(tiny_models.build(family, **CHANGES.get(family, {})), root / f"{name}.dense")
        )
        if scheme:
            source = pack(source.path, root / f"{name}.packed", scheme=scheme[0])[1]
        exported = export(source, folder, settings)
        wanted[name] = decoded(source, exported, settings)
        if scheme and not changes:  # nothing but the reader of the packed checkpoint decides
            assert quant_method(source)
            wanted[name] = answers(load_model(source, dtype=torch.float32))
    np.save(root / "weight.npy", WEIGHT.numpy())
    names, conversions = [*wanted, *CONVERTED], []
    for name, (family, options) in CONVERTED.items():
        stated = json.loads((root / family / "config.json").read_text())
        config = {key: value for key, value in stated.items() if not key.startswith("quantization")}
        dense = root / f"{family}.dense"
        if family == "gpt_oss":  # mlx-lm takes its experts as they are published alone
            dense = quantized_sources.make("mxfp4", root / "gpt_oss.published")
            ropes = {key: value for key, value in config.items() if "rope" in key}
            config = {**json.loads((dense / "config.json").read_text()), **ropes}
            options = {**options, "dtype": "float32"}
            config["quantization_config"] = {"quant_method": "mxfp4"}
        (dense / "config.json").write_text(json.dumps(config))
        weights = load_file(dense / "model.safetensors")  # GPT-2's published names have no prefix
        bare = {key.removeprefix("transformer."): value for key, value in weights.items()}
        save_file(bare, dense / "model.safetensors", metadata={"format": "pt"})
        folders = {"hf_path": str(dense), "mlx_path": str(root / name)}
        conversions.append({**folders, "quantize": True, **options})
    job = {"folders": [str(root / name) for name in names], "tokens": TOKENS, "new": NEW}
    job["convert"] = conversions
    job |= {"weight": str(root / "weight.npy"), "rules": [rule.config() for rule in RULES]}
    (root / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("load_mlx.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(root / "job.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors, lost = json.loads(done.stdout.splitlines()[-1])
    wanted |= {name: answers(load_model(root / name, dtype=torch.float32)) for name in CONVERTED}
    return root, dict(zip(names, errors, strict=True)), wanted, lost


@pytest.mark.parametrize("name", [*ROUNDED, *CARRIED, *CONVERTED])
def test_mlx_lm_computes_what_attar_decodes(results, name):
    root, errors, wanted, _ = results
    assert errors[name] is None
    logits, tokens = wanted[name]
    got = np.load(root / name / "logits.npy")
    assert (
        np.abs(got - logits).max()
        < (1e-3 if name.removeprefix("converted ") in GELU else 1e-5) * np.abs(logits).max()
    )
    assert json.loads((root / name / "generated.json").read_text()) == tokens


def test_nearest_loses_less_than_mx_quantize(results):
    for rule, theirs in zip(RULES, results[3], strict=True):
        ours = decode(rounded(WEIGHT, rule, torch.float32), rule) - WEIGHT
        assert ours.norm() / WEIGHT.norm() < theirs, rule
