"""Models of every family through a GGUF file into llama.cpp: its logits at every position are transformers'.

llama-cpp-python runs in the environment ``$ATTAR_PEERS/llama-cpp``, one process for all files. The files
have float32 weights; token ids are given, so no tokenizer is asked. The KV cache is float32.

llama.cpp looks GELU up in a table of float16; families with it agree to a few 1e-4 of the largest logit, the
others to a few 1e-6, those with a delta rule to a few 1e-5. Of Gemma 3n's sparse activations it divides the
variance by one neuron fewer, and so does transformers here. A random Gemma 3n of 22 blocks makes an error of
3e-4 in its embeddings 0.8: its first tokens are compared.
"""

import json
import os
import subprocess
import textwrap
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.formats.gguf.architecture import SILU
from attar.formats.gguf.config import file_placements, hf_config
from attar.formats.gguf.container import GGUFTensorInfo, GGUFWriter, TypedValue, read_gguf
from attar.formats.gguf.metadata import metadata
from attar.formats.gguf.tensor_map import architecture, placements
from attar.models.loading.load import load_model
from attar.models.surgery.cut_model import keep_layers
from tests import tiny_models
from tests.cuts import keep_heads, keep_neurons
from tests.formats.gguf.variants import VARIANTS, build, given_back, placed_tensors, said, stored, unstacked

pytestmark = pytest.mark.peers
PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "llama-cpp" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no llama-cpp-python: set ATTAR_PEERS", allow_module_level=True)

TOKENS = 24
LOGITS = textwrap.dedent(
    """
    import json, sys
    import numpy as np
    from llama_cpp import Llama

    for job in json.load(sys.stdin):
        model = Llama(job["file"], n_ctx=job["context"], n_batch=512, n_threads=1, n_threads_batch=1,
                      logits_all=True, flash_attn=False, type_k=0, type_v=0, verbose=False)
        model.eval(job["tokens"])
        np.save(job["out"], np.array(model.scores[:len(job["tokens"])]))
    """
)


def vocabulary(rows):
    """The tokenizer of a file, as small as llama.cpp accepts it: printable letters, then padding."""
    letters = [chr(code) for code in range(33, 127)] + [f"[PAD{index}]" for index in range(94, rows)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": TypedValue("[i32]", [1] * 94 + [5] * (rows - 94)),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def write(model, path, kind="F32"):
    """A GGUF file of a model."""
    config, state = said(model), stored(model)
    placed = placements(config, state)
    tensors = placed_tensors(placed, {name: tensor.float() for name, tensor in state.items()})
    matrices = {item.gguf for item in placed if item.matrix}
    slots = [
        GGUFTensorInfo(name, kind if name in matrices else "F32", tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    keys = metadata(config, "tiny") | vocabulary(config["vocab_size"])
    writer = GGUFWriter(path, keys, slots)
    for slot in slots:
        writer.add(slot.name, tensors[slot.name].half() if slot.kind == "F16" else tensors[slot.name])
    writer.finish()
    return path


def smaller(change):
    """A model from which something was removed."""
    model = build("llama2")
    if change == "heads":
        return keep_heads(model, [[0, 1, 3]] * 3)
    if change == "neurons":
        return keep_neurons(model, [list(range(0, 96, 2))] * 3)
    return keep_layers(model, [0, 2])


CASES = {
    **{name: (lambda name=name: build(name)) for name in VARIANTS},
    "llama with heads cut": lambda: smaller("heads"),
    "llama with neurons cut": lambda: smaller("neurons"),
    "llama with layers cut": lambda: smaller("layers"),
    "attar:tiny": lambda: load_model("attar:tiny").float(),
}
TEXTS = {"phi3 with longrope, long": "phi3 with longrope", "llama with longrope, long": "llama with longrope"}
"""The same models with a text that is longer than the original context."""
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
STEADY = {"gemma3n with shared keys": 12}
"""Tokens that are compared where later ones are not."""


def limit(name, gelu):
    """Of the error, of the largest logit."""
    family = VARIANTS.get(name, ("",))[0]
    if family in ("gemma3n", "gemma4"):
        return 1e-2 if name in STEADY else 2e-3
    return 1e-3 if gelu else 1e-4 if family in DELTA else 1e-5


@contextmanager
def sample_variance():
    """Within it torch's deviations are of one degree of freedom fewer."""
    original = torch.std
    torch.std = lambda x, dim, keepdim, unbiased: original(x, dim=dim, keepdim=keepdim, unbiased=True)
    try:
        yield
    finally:
        torch.std = original


def tokens(model, length):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, said(model)["vocab_size"], (1, length), generator=generator)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(logits of llama.cpp, of transformers, GELU) by case; float32 (tokens, vocabulary)."""
    folder = tmp_path_factory.mktemp("gguf")
    jobs, wanted = [], {}
    for number, name in enumerate([*CASES, *TEXTS]):
        model = CASES[TEXTS.get(name, name)]()
        length = 300 if name in TEXTS else TOKENS
        rows = tokens(model, length)
        with torch.no_grad(), sample_variance() if name.startswith("gemma3n") else nullcontext():
            wanted[name] = (model(rows).logits[0].numpy(), _gelu(model))
        file = write(model, folder / f"{number}.gguf")
        jobs.append({"file": str(file), "tokens": rows[0].tolist(), "out": str(folder / f"{number}.npy")})
        jobs[-1]["context"] = 512 if name in TEXTS else 64
    run(jobs)
    result = {name: np.load(job["out"]) for name, job in zip(wanted, jobs, strict=True)}
    return {name: (result[name], *wanted[name]) for name in wanted}


def _gelu(model):
    config = said(model)
    return config.get(architecture(config).activation, SILU[0]) not in SILU  # LFM2's is in its code


def run(jobs):
    done = subprocess.run(
        [str(PYTHON), "-c", LOGITS], input=json.dumps(jobs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", [*CASES, *TEXTS])
def test_logits_are_those_of_transformers(results, name):
    result, wanted, gelu = results[name]
    assert result.shape == wanted.shape and np.isfinite(result).all()
    result, wanted = (logits[: STEADY.get(name)] for logits in (result, wanted))
    error = np.abs(result - wanted).max() / np.abs(wanted).max()
    assert error < limit(name, gelu)
    assert (result.argmax(1) == wanted.argmax(1)).all()


def test_the_error_shows_a_head_out_of_order(results):
    """The comparison can fail: the files of two variants are not interchangeable."""
    result, wanted, _ = results["llama with linear rope"]
    other = results["llama with yarn"][0]
    assert np.abs(other - wanted).max() > 100 * np.abs(result - wanted).max()


def test_a_window_that_llama_cpp_leaves_out_changes_longer_texts_only(tmp_path):
    model = build("mistral")
    model.config.sliding_window = 8
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = 8
    rows = tokens(model, TOKENS)
    with torch.no_grad():
        wanted = model(rows).logits[0].numpy()
    file, out = write(model, tmp_path / "m.gguf"), tmp_path / "m.npy"
    run([{"file": str(file), "tokens": rows[0].tolist(), "out": str(out), "context": 64}])
    error = np.abs(np.load(out) - wanted).max(1)
    assert error[:8].max() < 1e-4 and error[8:].max() > 1e-2


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt2"])
def test_float16_files_agree_to_their_precision(tmp_path, name):
    model = build(name).half().float()
    rows = tokens(model, TOKENS)
    with torch.no_grad():
        wanted = model(rows).logits[0].numpy()
    file, out = write(model, tmp_path / "m.gguf", "F16"), tmp_path / "m.npy"
    run([{"file": str(file), "tokens": rows[0].tolist(), "out": str(out), "context": 64}])
    result = np.load(out)
    assert np.abs(result - wanted).max() / np.abs(wanted).max() < 5e-3


@pytest.mark.parametrize("name", [*CASES])
def test_files_are_read_back_as_the_model(tmp_path, name):
    model = CASES[name]()
    file = read_gguf(write(model, tmp_path / "m.gguf"))
    config = hf_config(file.metadata, file.tensors, file.load)
    state = stored(model)
    tensors = unstacked({name: file.load(name) for name in file.tensors})
    rounded = {one.gguf for one in placements(said(model), state) if one.negative_exp or one.scales}
    placed = [
        one
        for one in file_placements(config, tensors)
        if one.stored in state and not one.plus and one.gguf not in rounded
    ]
    for name, tensor in given_back(placed, tensors).items():
        assert torch.equal(tensor, state[name]), name
    assert config["bos_token_id"] == 0 and config["dtype"] == "float32"


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        *[("mixtral", "Q4_0"), ("deepseek_v3", "Q8_0"), ("granitemoe", "Q5_1"), ("gpt_oss", "MXFP4_MOE")],
        *[("qwen3_5_moe", "Q8_0"), ("gemma4 with experts", "Q8_0")],
    ],
)
def test_quantized_experts_run_in_llama_cpp(tmp_path, variant, kind):
    """Against the same codes decoded; llama.cpp rounds inputs to 8 bits, which may also send a token to
    another expert."""
    tiny_models.save(build(variant), tmp_path / "model")
    file, out = tmp_path / "m.gguf", tmp_path / "m.npy"
    exported = export(tmp_path / "model", file, ExportSettings(format="gguf", imatrix="none", type=kind))
    model = load_model(exported, dtype=torch.float32)
    rows = tokens(model, TOKENS)
    with torch.no_grad():
        wanted = model(rows).logits[0].numpy()
    run([{"file": str(file), "tokens": rows[0].tolist(), "out": str(out), "context": 64}])
    assert np.linalg.norm(np.load(out) - wanted) < 0.1 * np.linalg.norm(wanted)
