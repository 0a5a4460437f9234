"""The two servers of ``benchmarks/serve.py`` as processes, and the GGUF file that both read."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import environments

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768},
    "S": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "M": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "intermediate_size": 5632},
}
SLOT_TOKENS = 1024  # of one slot where slots share nothing: the longest request, and some more
HERE = Path(__file__).parent


@dataclass
class Server:
    """One that runs, and its numbers: one for each round.

    Attributes:
        usage: (share of the pool that requests hold, requests that wait), whenever it was looked at.
    """

    name: str
    port: int
    numbers: dict[str, list[float]] = field(default_factory=dict)
    usage: list[tuple[float, float]] = field(default_factory=list)

    def add(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self.numbers.setdefault(name, []).append(value)


def make_file(workdir: Path, model: str, kind: str) -> tuple[Path, int]:
    """The GGUF file, and how many tokens it knows.

    Args:
        model: a shape of random weights, or a checkpoint.
        kind: of the file's weights.
    """
    from attar.checkpoint import open_checkpoint
    from attar.deployment.settings import ExportSettings
    from attar.deployment.stage import export

    source = workdir / "model" if model in SHAPES else model
    if model in SHAPES:
        _random_model(workdir / "model", SHAPES[model])
    file = workdir / "model.gguf"
    export(source, file, ExportSettings(format="gguf", type=kind, imatrix="none"))
    return file, int(open_checkpoint(str(source)).config["vocab_size"])


def _random_model(folder: Path, shape: dict[str, int]) -> None:
    """A Llama of random weights with the tokenizer of attar:tiny."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from attar.checkpoint import open_checkpoint
    from attar.models.loading.load import TOKENIZER_FILES

    tiny = open_checkpoint("attar:tiny")
    config = LlamaConfig(
        **shape,
        num_key_value_heads=4 if shape["num_attention_heads"] > 4 else 1,
        vocab_size=int(tiny.config["vocab_size"]),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tiny.path / name).is_file():
            shutil.copy(tiny.path / name, folder / name)


@contextmanager
def servers(arguments: argparse.Namespace, file: Path) -> Iterator[list[Server]]:
    """Both, ready."""
    servers, processes = [], []
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    with tempfile.TemporaryDirectory() as logs:
        try:
            for name in arguments.servers:
                port = free_port()
                command = ours(arguments, file, port) if name == "attar" else theirs(arguments, file, port)
                with Path(logs, name).open("w") as log:
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
                wait(port, processes[-1], Path(log.name))
                servers.append(Server(name, port))
            yield servers
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def ours(arguments: argparse.Namespace, file: Path, port: int) -> list[Any]:
    job = {"model": str(file), "port": port, "threads": arguments.threads, "kv_tokens": arguments.kv_tokens}
    job |= {"sequences": arguments.slots, "weights": None, "runner": "compiled"}
    return [sys.executable, HERE / "peers" / "attar_serve_run.py", json.dumps(job)]


def theirs(arguments: argparse.Namespace, file: Path, port: int) -> list[Any]:
    """Every slot has cells of its own, unless one pool is asked for; the prompt cache is on, its default."""
    threads = str(arguments.threads)
    pool = ["--kv-unified"] if arguments.unified else ["--no-kv-unified"]
    cells = arguments.kv_tokens if arguments.unified else arguments.slots * SLOT_TOKENS
    given = ["-t", threads, "-tb", threads, "-c", str(cells), "-np", str(arguments.slots), *pool]
    given += ["--no-repack"] if arguments.no_repack else []
    return [environments.program("llama-server"), "-m", file, "--port", str(port), *given]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers."""
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-2000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"no answer: {log.read_text()[-2000:]}")
