"""mergekit in its own environment, and models small enough to be merged by it a hundred times: shared by the
tests that compare with it.

``$ATTAR_PEERS/mergekit`` is the environment (``benchmarks/peers/environments.py mergekit`` builds it).
Everything runs on one thread, as the order of a sum depends on the number of threads.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.companions import copy_companions
from attar.models.loading.load import save_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "mergekit" / "bin" / "python"
MISSING = "ATTAR_PEERS" not in os.environ or not PYTHON.exists()


@dataclass(frozen=True)
class Case:
    """A configuration, and how far apart the two may be.

    Attributes:
        text: YAML without dtype; ONE, TWO, THREE and BASE stand for folders.
        tied: (model, density, gamma) of the trimmings that may decide ties differently.
        selected: the same for the share of the variances.
        float32: bound in float32; 0: the same bits.
        bfloat16: bound in bf16.
    """

    text: str
    tied: tuple[tuple[str, float, float], ...] = ()
    selected: float = 1.0
    float32: float = 0.0
    bfloat16: float = 0.0


def listed(*names, **parameters):
    """``models:`` of YAML; a parameter is one value for all, or one for each."""
    item = []
    for name in names:
        mine = {k: v[name] if isinstance(v, dict) else v for k, v in parameters.items()}
        item.append({"model": name.upper(), **({"parameters": mine} if mine else {})})
    return item


def case(method, *names, base=None, each=None, shared=None, **bounds):
    """A case from its parts."""
    config = {"merge_method": method, "models": listed(*names, **(each or {}))}
    config |= {"base_model": base} if base else {}
    config |= {"parameters": shared} if shared else {}
    return Case(yaml.safe_dump(config, sort_keys=False), **bounds)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mergekit(runs):
    """Merge with mergekit, all in one process of one thread; its lines."""
    command = [PYTHON, BENCHMARKS / "peers" / "mergekit_run.py", "-"]
    ended = subprocess.run(
        [*map(str, command)],
        input=json.dumps({"runs": runs}),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def configured(text, dtype, folders):
    """The YAML of a case."""
    for name, folder in folders.items():
        text = text.replace(name, str(folder))
    return f"dtype: {dtype}\n{text}"


def stored(folder):
    """All tensors of a checkpoint by name."""
    return {
        name: tensor
        for file in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def little():
    """A Llama of 0.2 M parameters, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 2048}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes))


def write(model, folder):
    """Save a model with a tokenizer."""
    save_model(model, folder)
    copy_companions(open_checkpoint("attar:tiny").path, folder)
    return folder
