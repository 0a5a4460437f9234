"""Types of every tensor against llama.cpp's own quantizer, run on random models of many shapes.

The quantizer runs in the environment ``$ATTAR_PEERS/llama-cpp`` (benchmarks/peers/environments.py builds it).
"""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

from attar.formats.gguf.quant_types import DEFAULTS, mix
from attar.formats.gguf.types import FILE_TYPES, TYPES

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.peers
PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "llama-cpp" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no $ATTAR_PEERS/llama-cpp", allow_module_level=True)

MIXES = [name for name in DEFAULTS if name not in ("MXFP4", "NVFP4", "F16")]  # F16 is what is quantized
QUANTIZE = textwrap.dedent(
    """
    import ctypes, json, sys
    import llama_cpp as l

    quiet = l.llama_log_callback(lambda *_: None)
    l.llama_log_set(quiet, ctypes.c_void_p(0))

    def run(job):
        params = l.llama_model_quantize_default_params()
        params.nthread, params.ftype = 1, job["file_type"]
        if job["importance"]:
            entries = (l.llama_model_imatrix_data * (len(job["importance"]) + 1))()
            for entry, (name, size) in zip(entries, job["importance"].items()):
                data = (ctypes.c_float * size)(*[1.0] * size)
                entry.name, entry.data, entry.size = name.encode(), data, size
            params.imatrix = ctypes.cast(entries, type(params.imatrix))
        if job["overrides"]:
            own = (l.llama_model_tensor_override * (len(job["overrides"]) + 1))()
            for entry, (pattern, kind) in zip(own, job["overrides"]):
                entry.pattern, entry.type = pattern.encode(), kind
            params.tt_overrides = ctypes.cast(own, type(params.tt_overrides))
        return l.llama_model_quantize(job["source"].encode(), job["target"].encode(), ctypes.byref(params))

    print(json.dumps([run(job) for job in json.load(sys.stdin)]))
    """
)


class Model:
    """A random model in float16 that the quantizer takes for one of an architecture."""

    def __init__(self, architecture="llama", *, layers=3, heads=8, kv=8, K=256, F=256, tied=False, experts=0):
        self.architecture, self.layers, self.heads, self.kv = architecture, layers, heads, kv
        self.experts, self.K, self.F, self.tied = experts, K, F, tied
        self.fused = architecture in ("gpt2", "phi3", "falcon")
        self.shapes = dict(self._outer())
        for layer in range(layers):
            self.shapes.update({f"blk.{layer}.{name}": shape for name, shape in self._block()})

    def _outer(self):
        yield "token_embd.weight", (4, self.K)
        if self.architecture == "gpt2":
            yield "position_embd.weight", (4, self.K)
        yield "output_norm.weight", (self.K,)
        if not self.tied:
            yield "output.weight", (4, self.K)

    def _block(self):
        K, F = self.K, self.F
        yield "attn_norm.weight", (K,)
        for leaf in ["attn_qkv"] if self.fused else ["attn_q", "attn_k", "attn_v"]:
            yield f"{leaf}.weight", (4, K)
            yield f"{leaf}.bias", (4,)
        yield "attn_output.weight", (4, K)
        if self.experts:
            yield "ffn_gate_inp.weight", (self.experts, K)
            yield "ffn_up_exps.weight", (self.experts, 2, K)
            yield "ffn_down_exps.weight", (self.experts, 2, F)
        else:
            yield "ffn_up.weight", (4, K)
            yield "ffn_down.weight", (4, F)
            yield "ffn_gate.weight", (1, K)  # one row: no matrix to llama.cpp

    def write(self, file):
        writer = gguf.GGUFWriter(file, self.architecture)
        writer.add_block_count(self.layers)
        writer.add_context_length(64)
        writer.add_embedding_length(self.K)
        writer.add_feed_forward_length(self.F)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        writer.add_vocab_size(4)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(2)
        random = np.random.default_rng(0)
        for name, shape in reversed(self.shapes.items()):  # the order in the file must not matter
            kept = len(shape) == 1 or shape[0] == 1 or name.startswith("position") or "_inp" in name
            data = random.standard_normal(shape).astype(np.float32 if kept else np.float16)
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def ours(self, name, **options):
        return mix(
            name,
            self.shapes,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv,
            architecture=self.architecture,
            experts=self.experts,
            **options,
        )


MODELS = {
    "two layers": Model(layers=2),
    "tied": Model(layers=5, tied=True),
    "grouped": Model(layers=8, kv=2),
    "one key head": Model(layers=9, kv=1, tied=True),
    "sixteen": Model(layers=16, kv=4),
    "deep": Model(layers=34, kv=1),
    "narrow": Model(layers=9, K=96, F=160),
    "narrow feed-forward": Model(layers=9, F=96, tied=True),
    "odd": Model(layers=3, K=80, F=256),
    "odd and tied": Model(layers=3, K=80, tied=True),
    "qwen": Model("qwen2", layers=24, kv=2, tied=True),
    "gpt2": Model("gpt2", layers=12, tied=True),
    "phi": Model("phi3", layers=17, kv=2),
    "falcon": Model("falcon", layers=32, kv=1),
    "eighty": Model(layers=80, kv=1),
    "eighty, every head its own": Model(layers=80, kv=8),
    "eighty of qwen": Model("qwen2", layers=80, kv=8),
    "eight experts": Model(layers=9, kv=2, experts=8),
    "four experts": Model(layers=9, kv=2, experts=4),
}


def types_in(file):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


def importance(model):
    """Names and sizes of an importance matrix."""
    matrices = {name: shape for name, shape in model.shapes.items() if len(shape) > 1}
    return {name: shape[-1] * (shape[0] if len(shape) > 2 else 1) for name, shape in matrices.items()}


def theirs(model, folder, names, *, imatrix=False, overrides=()):
    """Types that llama.cpp gives, by mix."""
    source = folder / "source.gguf"
    model.write(source)
    jobs = [
        {
            "source": str(source),
            "target": str(folder / f"{name}.gguf"),
            "file_type": FILE_TYPES[name],
            "importance": importance(model) if imatrix else {},
            "overrides": [(pattern, TYPES[kind].id) for pattern, kind in overrides],
        }
        for name in names
    ]
    result = subprocess.run(
        [PYTHON, "-c", QUANTIZE], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [0] * len(jobs), result.stderr
    return {name: types_in(folder / f"{name}.gguf") for name in names}


@pytest.mark.parametrize("imatrix", [False, True])
@pytest.mark.parametrize("model", list(MODELS.values()), ids=list(MODELS))
def test_every_tensor_of_every_mix_has_llama_cpps_type(tmp_path, model, imatrix):
    names = [name for name in MIXES if imatrix or name != "Q2_K_S"]
    for name, wanted in theirs(model, tmp_path, names, imatrix=imatrix).items():
        got = model.ours(name, imatrix=imatrix)
        assert {one: got.kinds[one] for one in sorted(wanted)} == dict(sorted(wanted.items())), name


def test_tensors_with_a_type_of_their_own(tmp_path):
    model = MODELS["sixteen"]
    own = [
        ("blk\\.[02]\\.attn_v", "Q8_0"),
        ("attn_(q|k)", "Q5_K"),
        ("attn_q", "Q2_K"),
        ("output.weight", "F16"),
    ]
    names = ["Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "IQ4_XS", "Q8_0"]
    actual = theirs(model, tmp_path, names, overrides=own)
    for name, wanted in actual.items():
        got = model.ours(name, overrides=[f"{pattern}={kind}" for pattern, kind in own])
        assert got.kinds == {one: wanted[one] for one in got.kinds}, name
