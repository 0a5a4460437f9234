"""Quantize to a GGUF file with auto-round, inside its environment.

    python autoround_gguf_run.py '{"model", "tokens", "target", "type", "iterations", "like", "started"}'

``iterations`` 0: its rounding without learning. Its converter knows tokenizers by a hash and refuses others;
it is told what ``like``, attar's file of the same model, calls its own. Prints one JSON line: seconds in the
call, wall, peak_rss_mb.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import job as jobs

BATCH = 8  # rows, its own default


def name_tokenizer(like: str) -> None:
    """Let its converter take the name of the tokenizer from a file."""
    from auto_round.export.export_to_gguf import llama_cpp_conversion as conversion
    from gguf import GGUFReader

    field = GGUFReader(like).fields["tokenizer.ggml.pre"]
    name = bytes(field.parts[field.data[0]]).decode()
    conversion._import_conversion_from(conversion._bundled_root(), "bundled")
    sys.modules["conversion.base"].TextModel.get_vocab_base_pre = lambda *_: name


def main() -> None:
    """Do the job."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    job = SimpleNamespace(**asked)
    answer = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it writes into folders of its own choice
        import auto_round
        import transformers

        name_tokenizer(job.like)
        rows = jobs.load_tokens(job)  # type: ignore[arg-type]
        data = [
            {"input_ids": part, "attention_mask": part.new_ones(part.shape)} for part in rows.split(BATCH)
        ]
        kind = f"gguf:{job.type.lower()}"
        start = time.perf_counter()
        tool = auto_round.AutoRound(
            transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype="auto"),
            transformers.AutoTokenizer.from_pretrained(job.model),
            scheme=kind,
            dataset=data,
            nsamples=len(rows),
            seqlen=rows.shape[1],
            batch_size=BATCH,
            iters=job.iterations,
            device_map="cpu",
            low_cpu_mem_usage=False,
        )
        tool.quantize_and_save(f"{folder}/out", format=kind)
        seconds = time.perf_counter() - start
        (file,) = Path(folder).glob("out/**/*.gguf")
        file.replace(job.target)
    line = {"seconds": round(seconds, 3), "wall": round(time.time() - job.started, 3)}
    os.write(answer, (json.dumps({**line, "peak_rss_mb": jobs.peak_mb()}) + "\n").encode())


if __name__ == "__main__":
    main()
