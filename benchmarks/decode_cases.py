"""What ``decode.py`` times: the compiled runner, transformers, and llama.cpp in a process of its own.

A runner answers how long something takes: ``steps(count, start, tokens)`` seconds of ``tokens`` steps of one
token for each of `count` sequences, from position `start` on; ``prompt(tokens)`` seconds of a prompt.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from peers import environments
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig, StaticCache

from attar.kernels.decode import LayerWeights
from attar.kernels.memory import Arena
from attar.kernels.structures import PRODUCTS
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.runner.sparse_choice import sparse_pays
from attar.runtime.step import StepInput, TokenSpan

CONTEXT = 4352
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LLAMA_CPP = {"int4": "Q4_0", "int8": "Q8_0", "bf16": "BF16"}  # the same bits per weight
SHAPES: dict[str, dict[str, int]] = {
    "S": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 8192,
    },
    "M": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
    },
    "1B-A0.3B": {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,  # llama.cpp asks for it of an OLMoE
        "intermediate_size": 640,
        "vocab_size": 32000,
        "num_experts": 32,
        "num_experts_per_tok": 8,
    },
    "7B-A1B": {  # OLMoE-1B-7B
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "vocab_size": 50304,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}


class Runner(Protocol):
    """Something that decodes."""

    def steps(self, count: int, start: int, tokens: int) -> float: ...

    def prompt(self, tokens: int) -> float: ...

    def close(self) -> None: ...


def llama_config(shape: str) -> Any:
    """Of a shape: a Llama, or with experts an OLMoE."""
    kind = OlmoeConfig if "num_experts" in SHAPES[shape] else LlamaConfig
    return kind(**SHAPES[shape], max_position_embeddings=CONTEXT, tie_word_embeddings=False)


class Attar:
    """The compiled runner, one call a step; ``nbytes`` of weights that a step of one token reads; ``clock``
    of :data:`CLOCKS`."""

    def __init__(self, runner: Compiled, nbytes: int = 0, clock: str = "wall") -> None:
        self.runner, self.nbytes, self.clock = runner, nbytes, CLOCKS[clock]

    def steps(self, count: int, start: int, tokens: int) -> float:
        """Each sequence has blocks of its own."""
        blocks = min(CONTEXT, start + tokens + 16) // 16
        tables = [tuple(range(n * blocks, (n + 1) * blocks)) for n in range(count)]
        began = self.clock()
        for at in range(start, start + tokens):
            spans = tuple(TokenSpan(n, at, at + 1, table, 1) for n, table in enumerate(tables))
            self.runner.run(StepInput([at % 1000] * count, spans)).argmax(1)
        return self.clock() - began

    def prompt(self, tokens: int) -> float:
        """In one step."""
        step = StepInput(list(range(tokens)), (TokenSpan(0, 0, tokens, tuple(range(tokens // 16)), 1),))
        began = self.clock()
        self.runner.run(step)
        return self.clock() - began

    def close(self) -> None:
        """Ends its threads."""
        self.runner.close()


def random_runner(
    config: Any,
    kind: Any,
    kv_dtype: str,
    threads: int,
    bits: int = 16,
    sparsity: str = "",
    clock: str = "wall",
) -> Attar:
    """Random weights of a shape, rounded to a kind. One layer is packed, and copied to all others."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types = 1, None
    load, pays = random_tensor(one, sparsity), sparse_pays(bits, threads)
    weights = model_weights(one, tensor_shapes(one), load, weights=kind, pays=pays)
    arena = Arena()
    layers = [_copied(weights.layers[0], arena) for _ in range(config.num_hidden_layers - 1)]
    weights = replace(weights, layers=(weights.layers[0], *layers))
    settings: dict[str, Any] = {"kv_dtype": kv_dtype, "threads": threads, "bits": bits}
    return Attar(Compiled(weights, blocks=CONTEXT // 16, **settings), weights.read_bytes, clock)


def _copied(layer: LayerWeights, arena: Arena) -> LayerWeights:
    """A layer with the same weights in memory of its own."""

    def copied(one: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(map(copied, one))
        return one and replace(one, data=arena.allocate(one.nbytes).copy_(one.data))

    mixture = layer.mixture
    if mixture is not None:
        experts = {name: copied(getattr(mixture, name)) for name in ("gate_up", "down")}
        mixture = replace(mixture, **experts, router=mixture.router.clone())
    return replace(layer, mixture=mixture, **{name: copied(getattr(layer, name)) for name in PRODUCTS})


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of a model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def random_tensor(config: Any, sparsity: str = "") -> Callable[[str], Tensor]:
    """Norms of ones and weights N(0, 0.02^2), the same for all of a shape: time does not depend on them. Of
    layers the smaller half of each four weights (2:4), or of all (50%), may be zero."""
    shapes = tensor_shapes(config)
    encoded: dict[tuple[int, ...], Tensor] = {}

    def load(name: str) -> Tensor:
        shape = shapes[name]
        if shape not in encoded:
            encoded[shape] = torch.ones(shape) if len(shape) == 1 else (torch.randn(shape) * 0.02).bfloat16()
            if sparsity and len(shape) == 2 and "layers" in name:
                encoded[shape] = sparse(encoded[shape], sparsity)
        return encoded[shape]

    return load


def sparse(weight: Tensor, sparsity: str) -> Tensor:
    """Of magnitudes: the smaller two of each four inputs, or half of all weights, zero."""
    size = weight.abs().float()
    if sparsity == "2:4":
        ranks = size.unflatten(1, (-1, 4)).argsort(2).argsort(2).flatten(1)
        return weight.masked_fill(ranks < 2, 0.0)
    return weight.masked_fill(size < size.flatten()[:100_000].median(), 0.0)


class Transformers:
    """Its own modules in bf16, a static cache."""

    def __init__(self, config: Any) -> None:
        torch.set_default_dtype(torch.bfloat16)
        self._model: Any = AutoModelForCausalLM.from_config(config).eval()
        torch.set_default_dtype(torch.float32)

    @torch.inference_mode()
    def steps(self, count: int, start: int, tokens: int) -> float:
        """Behind a prompt that is not timed."""
        cache = StaticCache(config=self._model.config, max_cache_len=start + tokens + 1)
        ids = torch.zeros(count, start, dtype=torch.int64)
        self._model(ids, past_key_values=cache, logits_to_keep=1)
        began = time.perf_counter()
        for _ in range(tokens):
            self._model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - began

    @torch.inference_mode()
    def prompt(self, tokens: int) -> float:
        """In one pass."""
        began = time.perf_counter()
        self._model(torch.arange(tokens)[None], logits_to_keep=1)
        return time.perf_counter() - began

    def close(self) -> None:
        """Its memory goes."""
        self._model = None


class LlamaCpp:
    """``peers/llamacpp_decode_run.py`` in its environment; ``job`` is described there."""

    def __init__(self, **job: Any) -> None:
        script = Path(__file__).parent / "peers" / "llamacpp_decode_run.py"
        command = [str(environments.python("llama-cpp")), str(script), json.dumps(job)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def steps(self, count: int, start: int, tokens: int) -> float:
        """Behind what is there already."""
        return self._seconds({"count": count, "start": start, "tokens": tokens})

    def prompt(self, tokens: int) -> float:
        """In batches of 512."""
        return self._seconds({"prompt": tokens})

    def _seconds(self, request: dict[str, Any]) -> float:
        return float(self.ask(request)["seconds"])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of its script."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer
