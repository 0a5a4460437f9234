"""attar:tiny through GGUF into llama.cpp: the same greedy tokens, the same perplexity, for the types people
use.

llama-cpp-python runs in the environment ``$ATTAR_PEERS/llama-cpp``, one process for all files.
"""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import attar
from attar.data.packing import evaluation_rows
from attar.models.loading.load import load_model, load_tokenizer

pytestmark = pytest.mark.peers
PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "llama-cpp" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no llama-cpp-python: set ATTAR_PEERS", allow_module_level=True)

TYPES = ("F16", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0")
PROMPT, SPOKEN, TEXT = "def main(argv):\n    ", 200, 512
SCRIPT = textwrap.dedent(
    """
    import json, sys
    import numpy as np
    from llama_cpp import Llama, llama_cpp

    default = llama_cpp.llama_model_default_params

    def without_repacking():  # its kernels for AMX crash on some machines
        params = default()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_model_default_params = without_repacking
    job = json.load(sys.stdin)
    for kind, file in job["files"].items():
        model = Llama(file, n_ctx=1024, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
        prompt = model.tokenize(job["prompt"].encode(), add_bos=False)
        spoken = []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            spoken.append(token)
            if len(spoken) == job["spoken"]:
                break
        model.reset()
        model.eval(job["text"])
        scores = np.array(model.scores[: len(job["text"])], dtype=np.float64)
        scores -= np.logaddexp.reduce(scores, axis=1, keepdims=True)
        loss = -scores[np.arange(len(job["text"]) - 1), job["text"][1:]].mean()
        print(json.dumps({"kind": kind, "prompt": prompt, "spoken": spoken, "loss": loss}), flush=True)
    """
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What llama.cpp says of each file, and the text that it read."""
    folder = tmp_path_factory.mktemp("files")
    files = {kind: folder / f"{kind}.gguf" for kind in TYPES}
    for kind, file in files.items():
        attar.export("attar:tiny", file, format="gguf", type=kind)
    packed = evaluation_rows(
        load_tokenizer("attar:tiny"), "python-stdlib", tokens=TEXT, sequence_length=TEXT, seed=0
    )
    text = packed.rows[0].tolist()
    job = {"files": {k: str(v) for k, v in files.items()}, "prompt": PROMPT, "spoken": SPOKEN, "text": text}
    ended = subprocess.run(
        [PYTHON, "-c", SCRIPT], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return files, text, {row["kind"]: row for row in rows}


def test_greedy_tokens_are_transformers(answers):
    _, _, rows = answers
    model = load_model("attar:tiny", dtype=torch.float32)
    ids = load_tokenizer("attar:tiny")(PROMPT, add_special_tokens=False)["input_ids"]
    assert rows["F16"]["prompt"] == ids
    with torch.no_grad():
        generated = model.generate(
            torch.tensor([ids]), max_new_tokens=SPOKEN, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert rows["F16"]["spoken"] == generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", TYPES)
def test_perplexity_is_ours(answers, kind):
    """llama.cpp rounds the inputs of quantized weights to 8 bits; its loss differs by less than half a
    hundredth."""
    files, text, rows = answers
    model = load_model(files[kind], dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text])).logits[0].double()
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:])).item()
    assert len(rows[kind]["spoken"]) == SPOKEN
    bound = 1e-4 if kind == "F16" else 5e-3
    assert np.isclose(rows[kind]["loss"], loss, rtol=bound), (rows[kind]["loss"], loss)
