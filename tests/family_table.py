"""The table of families in docs/families.md: what each verb does with each family, tried on tiny random
models.

    python -m tests.family_table            writes docs/families.md from what happens
    python -m tests.family_table gpt_oss    prints the rows of some families

``cell`` runs a verb and looks at what came out, against transformers wherever there are logits. It returns
what the verb did, or the message with which it refuses. tests/test_family_table.py holds every cell.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

import attar
from attar.checkpoint import open_checkpoint
from attar.errors import AttarError
from attar.models.loading.load import load_model
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests import tiny_models
from tests.serving.http.test_live import running_app

DOCUMENT = Path(__file__).parents[1] / "docs/families.md"
ENCODERS = tiny_models.ENCODERS

# name in the table -> family of tests/tiny_models.py
ROWS = {
    "Llama 2": "llama2",
    "Llama 3": "llama3",
    "Mistral": "mistral",
    "Mistral 3 (Ministral 3)": "ministral3",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma": "gemma",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3",
    "Gemma 3n": "gemma3n",
    "Gemma 4": "gemma4",
    "Phi": "phi",
    "Phi-3": "phi3",
    "SmolLM3": "smollm3",
    "Granite": "granite",
    "OLMo 2": "olmo2",
    "Seed-OSS": "seed_oss",
    "StableLM": "stablelm",
    "StarCoder2": "starcoder2",
    "GPT-2": "gpt2",
    "GPT-NeoX": "gpt_neox",
    "OPT": "opt",
    "Mixtral": "mixtral",
    "Qwen2-MoE": "qwen2_moe",
    "Qwen3-MoE": "qwen3_moe",
    "OLMoE": "olmoe",
    "GLM-4-MoE": "glm4_moe",
    "Phi-MoE": "phimoe",
    "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V2-Lite": "deepseek_v2_lite",
    "DeepSeek-V3": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "Granite MoE": "granitemoe",
    "Llama 4 (text)": "llama4",
    "Granite 4 hybrid": "granitemoehybrid",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5",
    "Qwen3.5-MoE": "qwen3_5_moe",
    "LFM2": "lfm2",
    "LFM2-MoE": "lfm2_moe",
    "Mamba 2": "mamba2",
    "Falcon-H1": "falcon_h1",
    "Nemotron-H": "nemotron_h",
    "Gemma 3 (with vision)": "gemma3_vision",
    "Mistral 3 (with vision)": "mistral3_vision",
    "Qwen3-VL": "qwen3_vl",
    "Llama 4 (with vision)": "llama4_vision",
    "BERT": "bert",
    "RoBERTa": "roberta",
    "DistilBERT": "distilbert",
}


class Tiny:
    """A tiny model of a family, saved in bfloat16, and its answers."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.encoder = family in ENCODERS
        self.vision = family.endswith(("vision", "vl"))

    @cached_property
    def path(self) -> Path:
        return tiny_models.save(tiny_models.build(self.family), self.folder / "model", dtype=torch.bfloat16)

    @cached_property
    def other(self) -> Path:
        return tiny_models.save(
            tiny_models.build(self.family, seed=1), self.folder / "other", dtype=torch.bfloat16
        )

    @cached_property
    def model(self) -> Any:
        kind = getattr(transformers, open_checkpoint(self.path).config["architectures"][0])
        return kind.from_pretrained(self.path, dtype=torch.float32).eval()

    @cached_property
    def model_type(self) -> str:
        return str(open_checkpoint(self.path).config["model_type"])

    @cached_property
    def rows(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, tiny_models.VOCABULARY, (4, 24), generator=generator)

    def logits(self, model: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        return tiny_models.logits(model, self.rows if rows is None else rows)

    @cached_property
    def wanted(self) -> torch.Tensor:
        return self.logits(self.model)

    @cached_property
    def text(self) -> str:
        file = self.folder / "text.txt"
        lines = (f"line {n}: the {n * n} words of {n % 7} are {n % 11} and {n % 13}.\n" for n in range(4000))
        file.write_text("".join(lines))
        return str(file)

    def calibrated(self) -> dict[str, Any]:
        return {"samples": 4, "sequence_length": 32, "batch_size": 4, "data": self.text}

    def close(self, model: Any, tolerance: float) -> None:
        """The median KL of a model's predictions to the original's is at most ``tolerance``: a few tokens of
        a mixture of random weights go to another expert, whatever the change."""
        p, q = (logits.log_softmax(-1) for logits in (self.wanted, self.logits(model)))
        kl = (p.exp() * (p - q)).sum(-1).median()
        assert -1e-5 < kl < tolerance, kl

    @cached_property
    def greedy(self) -> list[int]:
        tokens = self.rows[:1, :9]
        for _ in range(8):
            tokens = torch.cat([tokens, self.logits(self.model, tokens)[:, -1:].argmax(-1)], 1)
        return tokens[0, 9:].tolist()


def inspect(tiny: Tiny) -> str:
    """Parameters are those of transformers, by the family's name."""
    seen = attar.inspect(tiny.path)
    tensors = {tensor.data_ptr(): tensor.numel() for tensor in tiny.model.state_dict().values()}
    assert seen.parameters == sum(tensors.values())
    assert seen.model_type == tiny.model.config.model_type and seen.to_dict()["parts"]
    return "yes"


def quantize(tiny: Tiny) -> str:
    """Eight bits by GPTQ, else to nearest, change little."""
    options = {"scheme": "W8A16", "group_size": 32, "check_tokens": 0, **tiny.calibrated()}
    done = "yes"
    try:
        out = attar.quantize(tiny.path, tiny.folder / "gptq", method="gptq", **options)
    except AttarError as error:
        refused = refusal(error, tiny)
        try:
            out = attar.quantize(tiny.path, tiny.folder / "rtn", method="rtn", **options)
        except AttarError:
            return refused
        done = f"nearest only: {refused.removeprefix('no: ')}"
    linears = len(out.card.details["layers"])
    assert linears > 3 and sum("packed" in name or "weight_scale" in name for name in out.tensors) >= linears
    tiny.close(load_model(out.path, dtype=torch.float32), 0.05)
    return done


def zeros(tiny: Tiny) -> str:
    """Half of the blocks' weights are zero by Wanda, else by magnitude, in a model that loads."""
    options = {"sparsity": "0.5", **tiny.calibrated()}
    done = "yes"
    try:
        out = attar.prune(tiny.path, tiny.folder / "wanda", method="wanda", **options)
    except AttarError as error:
        refused = refusal(error, tiny)
        try:
            out = attar.prune(tiny.path, tiny.folder / "magnitude", method="magnitude", sparsity="0.5",
                              reconstruct="none")  # fmt: skip
        except AttarError:
            return refused
        done = f"magnitude only: {refused.removeprefix('no: ')}"
    layers = out.card.details["layers"]
    assert len(layers) > 3 and all(0.45 < layer["sparsity"] < 0.55 for layer in layers)
    assert torch.isfinite(tiny.logits(load_model(out.path, dtype=torch.float32))).all()
    return done


def cut(tiny: Tiny) -> str:
    """Half of the experts, or of the neurons, are removed; the smaller model loads in transformers."""
    if tiny.family in tiny_models.MIXTURES or tiny.family in ("llama4_vision", "qwen3_5_moe"):
        options: dict[str, Any] = {"method": "experts", "ratio": 0.5}
    else:
        options = {"method": "neurons", "ratio": 0.5}
    out = attar.prune(tiny.path, tiny.folder / "cut", **options, **tiny.calibrated())
    smaller = type(tiny.model).from_pretrained(out.path, dtype=torch.float32).eval()
    sizes = [sum(p.numel() for p in model.parameters()) for model in (smaller, tiny.model)]
    assert sizes[0] < 0.95 * sizes[1] and torch.isfinite(tiny.logits(smaller)).all()
    return options["method"]


TRAINING = {"steps": 2, "batch_size": 2, "sequence_length": 32, "learning_rate": 1e-3}


for _task in ("causal", "masked"):  # their losses on held-out text are not looked at
    import_module(f"attar.distillation.tasks.{_task}").HELD_OUT_TOKENS = 256


def distill(tiny: Tiny) -> str:
    """A student of the same shape learns: its tensors change, and it loads."""
    task = {"task": "masked"} if tiny.encoder else {}
    out = attar.distill(
        tiny.path, tiny.folder / "student", student=str(tiny.other), data=tiny.text, **TRAINING, **task
    )
    return _trained(tiny, out, tiny.other)


def recover(tiny: Tiny) -> str:
    """A model is trained back to another of its shape."""
    out = attar.recover(tiny.other, tiny.folder / "recovered", teacher=tiny.path, data=tiny.text, **TRAINING)
    return _trained(tiny, out, tiny.other)


def _trained(tiny: Tiny, out: Any, start: Path) -> str:
    """The trained model loads, and most of its matrices moved."""
    model, before = load_model(out.path, dtype=torch.float32), load_model(start, dtype=torch.float32)
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    moved = [not torch.equal(a, b) for a, b in pairs if a.dim() > 1]
    assert sum(moved) > 0.5 * len(moved) and torch.isfinite(tiny.logits(model)).all()
    return "yes"


def merge(tiny: Tiny) -> str:
    """The mean of two models, tensor by tensor."""
    models = [{"model": str(path), "parameters": {"weight": 1.0}} for path in (tiny.path, tiny.other)]
    out = attar.merge(
        {"merge_method": "linear", "models": models, "dtype": "float32"}, tiny.folder / "merged"
    )
    one, two, mean = (open_checkpoint(path) for path in (tiny.path, tiny.other, out.path))
    assert mean.tensors.keys() == one.tensors.keys()
    for name in one.tensors:
        wanted = (one.load(name).float() + two.load(name).float()) / 2
        torch.testing.assert_close(mean.load(name).float(), wanted, atol=1e-6, rtol=1e-6)
    assert torch.isfinite(tiny.logits(load_model(out.path, dtype=torch.float32))).all()
    return "yes"


def gguf(tiny: Tiny) -> str:
    """A file whose tensors are read back as the model."""
    out = attar.export(tiny.path, tiny.folder / "m.gguf", format="gguf", type="F32", imatrix="none",
                       pretokenizer="gpt-2")  # fmt: skip
    got = load_model(out, dtype=torch.float32)
    if tiny.family == "gpt_oss":  # llama.cpp's yarn cuts where gpt-oss's does not; the export says so
        tiny.close(got, 1e-3)
    else:
        torch.testing.assert_close(tiny.logits(got), tiny.wanted, atol=2e-5, rtol=1e-5)
    return "yes"


EXACT: dict[str, Any] = {"kv_dtype": "float32", "activations": 16, "kv_tokens": 256}


def _runs(tiny: Tiny, runner: str) -> str:
    llm = LLM(tiny.path, runner=runner, **EXACT)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    result = llm.generate([tiny.rows[0, :9].tolist()], params)[0]
    assert list(result.token_ids) == tiny.greedy
    return "yes"


def compiled(tiny: Tiny) -> str:
    """Greedy tokens of the compiled step are transformers'."""
    return _runs(tiny, "compiled")


def modules(tiny: Tiny) -> str:
    """Greedy tokens of transformers' modules in attar's engine are transformers' own."""
    return _runs(tiny, "modules")


def serve(tiny: Tiny) -> str:
    """A completion over HTTP is transformers' greedy one."""
    llm = LLM(tiny.path, **EXACT)
    settings = ServerSettings(port=0)
    words = ServerTokenizer(llm.tokenizer)
    app = create_app(EngineBackend(llm.streams()), settings, tokenizer=words, model="tiny")
    body = {"model": "tiny", "prompt": tiny.rows[0, :9].tolist(), "max_tokens": 8, "temperature": 0}
    with running_app(app, settings) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"] == llm.tokenizer.decode(tiny.greedy, skip_special_tokens=True)
    return "yes"


VERBS: dict[str, Callable[[Tiny], str]] = {
    "inspect": inspect,
    "quantize": quantize,
    "prune: zeros": zeros,
    "prune: units": cut,
    "distill": distill,
    "recover": recover,
    "merge": merge,
    "export: GGUF": gguf,
    "run: compiled": compiled,
    "run: modules": modules,
    "serve": serve,
}


def refusal(error: AttarError, tiny: Tiny) -> str:
    """What the table says of an error: its message without paths, numbers and the family's name."""
    message = re.sub(r"/[^\s:,]*", "MODEL", str(error).splitlines()[0])
    message = re.sub(r"\.\d+(?=[.\s:,]|$)", ".N", message)
    message = re.sub(r"(?<![\w.])\[?\d+(?:, \d+)*\]?(?![\w.-])", "n", message)
    return "no: " + re.sub(rf"(?<![\w/]){tiny.model_type}(?!\w)", "FAMILY", message)


def cell(verb: str, tiny: Tiny) -> str:
    """What a verb does with a family: ``yes``, a kind of yes, or ``no: `` and the message."""
    try:
        return VERBS[verb](tiny)
    except AttarError as error:
        return refusal(error, tiny)


TEXT = """# Families

What each verb does with each family. Every cell was tried on a tiny random model in the shape of the family's
published configs, and a test holds it (`tests/test_family_table.py`): where there are logits they are
compared with transformers', and a refusal has the words listed below the table.
`python -m tests.family_table --write` makes this page.

- **inspect**: parameters as transformers counts them. **quantize**: GPTQ to W8A16 with calibration; *nearest
  only*: `--method rtn`. **zeros**: half of the blocks' weights by Wanda; *magnitude only*: `--method
  magnitude`.
- **units**: half of the experts of a mixture, else half of the neurons, really removed. **distill**,
  **recover**: trained for some steps towards another model of the family. **merge**: the mean of two.
- **GGUF**: written, and read back with the same logits; llama.cpp's own are compared in
  `tests/peers/test_llama_cpp_logits.py`. **compiled**, **modules**: the engine's greedy tokens on attar's C++
  step and on transformers' modules. **serve**: a completion over HTTP, on the runner that the engine chooses.

"""
SHORT = {"prune: zeros": "zeros", "prune: units": "units", "export: GGUF": "GGUF"}
SHORT |= {"run: compiled": "compiled", "run: modules": "modules"}
Table = dict[str, dict[str, str]]
"""What a verb does, by family and verb."""


def render(table: Table) -> str:
    """The page; refusals are numbered in the order of their first cell."""
    notes: dict[str, int] = {}

    def short(text: str) -> str:
        kind, _, why = text.partition(": ")
        return f"{kind} ({notes.setdefault(why, len(notes) + 1)})" if why else text

    lines = ["| family | " + " | ".join(SHORT.get(verb, verb) for verb in VERBS) + " |"]
    lines.append("|---" * (1 + len(VERBS)) + "|")
    for name, family in ROWS.items():
        lines.append(f"| {name} | " + " | ".join(short(table[family][verb]) for verb in VERBS) + " |")
    why = [f"{number}. {text}" for text, number in notes.items()]
    return (
        TEXT
        + "\n".join([*lines, "", "MODEL is the path of the model, FAMILY its `model_type`:", "", *why])
        + "\n"
    )


def parse(document: str) -> Table:
    """The table of a page."""
    why = dict(re.findall(r"^(\d+)\. (.*)$", document, re.MULTILINE))
    table: Table = {}
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in ROWS:
            texts = (re.sub(r" \((\d+)\)$", lambda note: f": {why[note[1]]}", text) for text in cells[1:])
            table[ROWS[cells[0]]] = dict(zip(VERBS, texts, strict=True))
    return table


def main() -> None:
    """Try the cells of some families, or of all; with ``--write`` into the page."""
    wanted = [argument for argument in sys.argv[1:] if argument != "--write"]
    table = parse(DOCUMENT.read_text(encoding="utf-8")) if DOCUMENT.exists() else {}
    for family in wanted or ROWS.values():
        with tempfile.TemporaryDirectory() as folder:
            tiny, row = Tiny(family, Path(folder)), {}
            for verb in VERBS:
                started = time.time()
                row[verb] = cell(verb, tiny)
                print(family, verb, row[verb], f"{time.time() - started:.1f}s", sep=" | ", flush=True)
            table[family] = row
    if "--write" in sys.argv:
        DOCUMENT.write_text(render(table), encoding="utf-8")


if __name__ == "__main__":
    main()
