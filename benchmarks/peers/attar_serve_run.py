"""attar's server with the limits of a benchmark.

python attar_serve_run.py '{"model", "port", "threads", "kv_tokens", "sequences", "weights"}'
"""

from __future__ import annotations

import json
import sys

import torch

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.run import run
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer


def main() -> None:
    """Serve until a signal comes."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    limits = Limits(sequences=job["sequences"])
    llm = LLM(
        job["model"], kv_tokens=job["kv_tokens"], limits=limits, weights=job["weights"], runner=job["runner"]
    )
    settings = ServerSettings(port=job["port"], name="model", max_queue=100_000)
    app = create_app(EngineBackend(llm.streams()), settings, tokenizer=ServerTokenizer(llm.tokenizer))
    print(type(llm.engine.runner).__name__, file=sys.stderr)
    run(app, settings, lambda line: None)


if __name__ == "__main__":
    main()
