"""``README.md`` of a checkpoint that attar made: the model card for readers and the Hugging Face Hub.

It has the content of ``attar.json`` as text: lineage, settings, size, measurements, the duties of the
licences, and the commands that run the model. Like the card it holds no time and no path of this machine, so
the same work writes the same file.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from attar.checkpoint import hashing
from attar.checkpoint.atomic import write_bytes
from attar.checkpoint.card import FILE as CARD
from attar.checkpoint.card import Card, Parent
from attar.checkpoint.draft_head import draft_head_of
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.units import bytes_text

FILE = "README.md"
MODELFILE = "Modelfile"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_LICENCES = {
    **{name: name for name in ("apache-2.0", "mit", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3")},
    **{name: name for name in ("llama4", "gemma")},
    "qwen-apache": "apache-2.0",
    "mistral-apache": "apache-2.0",
    "gpt-oss": "apache-2.0",
    "deepseek-mit": "mit",
}
_RELATIONS = {"quantize": "quantized", "export": "quantized", "merge": "merge", "extract": "adapter"}
_MEASURES = {
    "kl_mean": "KL divergence to the original, nats a token",
    "kl_mean_stderr": "standard error of the KL divergence",
    "kl_mean_row_stderr": "standard error of the KL divergence over texts",
    "kl_noise_floor": "KL divergence of the original to itself with products in bfloat16",
    "kl_noise_floor_row_stderr": "standard error of that over texts",
    "tokens_lost": "predicted right by the original alone",
    "tokens_won": "predicted right by this model alone",
    "quality_kept": "predicted right, as a share of what the original does",
    "quality_kept_stderr": "standard error of that share",
    "answers_same": "greedy answers that are the original's, token for token",
    "answers_agreement": "share of an answer before it leaves the original's",
    "answers_agreement_stderr": "standard error of that share",
    "answers_length": "tokens of an answer, up to the length that was asked for",
    "reference_answers_length": "tokens of the original's answers",
    "top1_agreement": "tokens where its first choice is the original's",
    "tokens": "tokens that this was measured on",
    "perplexity": "perplexity",
}
_ENGINES = {
    "compressed-tensors": "vllm serve {name}",
    "gptq": "vllm serve {name}",
    "awq": "vllm serve {name}",
    "bitsandbytes": "vllm serve {name}",
    "modelopt": "vllm serve {name} --quantization modelopt",
}
_HEADS = {
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
}
"""Ends of an encoder's class name, transformers' class that loads it and the hub's name of its task."""

_PACKAGES = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
}


def write_readme(card: Card, folder: Path, single: str = "") -> None:
    """Write the file into the folder of a finished checkpoint.

    Args:
        card: the checkpoint's; its files need not be hashed yet.
        single: the name of the single GGUF file that stays of the folder; its files are named after it.

    Raises:
        OutputError: no space, or no permission.
    """
    write_bytes(folder / FILE, render_readme(card, folder, single).encode())


def with_new_readme(card: Card, file: Path) -> Card:
    """The card after new measurements: its README, unless somebody edited it, is written and hashed anew."""
    if not file.is_file():
        return card
    text = _with_measurements(file.read_text(encoding="utf-8", errors="replace"), card)
    digest = hashing.sha256_text(text)
    # the second: a kill came after the file was written and before the card
    if hashing.sha256_file(file) not in (card.files.get(file.name), digest):
        return card
    write_bytes(file, text.encode())
    return dataclasses.replace(card, files={**card.files, file.name: digest})


def _with_measurements(text: str, card: Card) -> str:
    """A README with the section of a card's measurements behind how the model is run."""
    front, separator, body = text.removeprefix("---\n").partition("\n---\n")
    if text.startswith("---\n") and separator:
        fields = {**yaml.safe_load(front), **_model_index(card)}
        text = f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---\n{body}"
    sections = text.rstrip("\n").split("\n\n## ")
    sections = [section for section in sections if not section.startswith("Measurements\n")]
    usage = next((i for i, part in enumerate(sections) if part.startswith("Run it\n")), len(sections) - 1)
    sections.insert(usage + 1, f"Measurements\n\n{_measurements(card)}")
    return "\n\n## ".join(sections) + "\n"


def render_readme(card: Card, folder: Path, single: str = "") -> str:
    """YAML for the hub, then sections."""
    sections = [
        f"# {card.name}\n\n{_summary(card)}",
        _section("What it is", _table(_facts(card, folder, single))),
        _section("Run it", "\n\n".join(_commands(card, folder, single))),
        _section("Measurements", _measurements(card)),
        _section("Licence", "\n".join(f"- {line}" for line in _licence(card))),
        _section("How it was made", _provenance(card, single)),
    ]
    front = yaml.safe_dump(_front(card, folder), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _front(card: Card, folder: Path) -> dict[str, Any]:
    """The front matter for the hub."""
    bases = [name for name in dict.fromkeys(map(_bare, root_names(card.parents))) if HUB_NAME.fullmatch(name)]
    ids = list(dict.fromkeys(source.get("id", "") for source in card.licence.get("sources", ())))
    names = dict.fromkeys(_HUB_LICENCES.get(name, "other") for name in ids)
    front: dict[str, Any] = {}
    if bases:
        front["base_model"] = bases
        front["base_model_relation"] = _RELATIONS.get(card.stage, "finetune")
    if ids:
        front["license"] = next(iter(names)) if len(names) == 1 else "other"
    if ids and front["license"] == "other":
        front["license_name"] = "-".join(ids)
    front["library_name"] = _library(folder)
    if draft_head_of(_config(folder)) is None:
        front["pipeline_tag"] = _head(folder)[1]
    front["tags"] = ["attar", card.stage, *([_format(folder)] if _format(folder) else [])]
    return {**front, **_model_index(card)}


def _model_index(card: Card) -> dict[str, Any]:
    """The figures that the hub shows: those that compare with the original; empty without a KL."""
    if card.measurements.get("kl_mean") is None:
        return {}
    metrics = [
        {"type": name, "name": _MEASURES[name], "value": value}
        for name, value in _numbers(card.measurements)
        if name in _MEASURES
    ]
    text = _bare(str(card.measurements.get("data", "held-out text")).removeprefix("whole:"))
    result = {
        "task": {"type": "text-generation"},
        "dataset": {"type": "text", "name": text},
        "metrics": metrics,
    }
    return {"model-index": [{"name": card.name, "results": [result]}]}


def _summary(card: Card) -> str:
    parents = [f"`{_bare(parent.name)}`" for parent in card.parents if parent.role == "weights"]
    teachers = [f"`{_bare(parent.name)}`" for parent in card.parents if parent.role == "signal"]
    learned = f", learning from {_and(teachers)}" if teachers else ""
    return (
        f"Made from {_and(parents)} with attar's `{card.stage}`{learned}." if parents else "Made with attar."
    )


def _facts(card: Card, folder: Path, single: str) -> list[tuple[str, str]]:
    """Rows of the table: the main settings, then sizes."""
    names = ("scheme", "format", "type", "method", "ratio", "sparsity")
    settings = {name: card.settings.get(name) for name in names}
    rows = [(name, f"`{value}`") for name, value in settings.items() if value not in (None, "", "auto")]
    if importance := card.details.get("importance"):
        rows.append(("importance matrix", str(importance)))
    if zeros := card.details.get("zeros"):
        rows.append(
            ("zeros", f"{zeros['fraction']:.1%} of {zeros['of']:,} weights, stored {zeros['stored']}")
        )
        rows.append(("speed", zeros["speed"]))
    if head := draft_head_of(_config(folder)):
        draft_tokens, all_tokens, target = head["draft_vocabulary"], head["vocabulary"], _bare(head["target"])
        rows.append(("draft head", f"`{head['kind']}`, {head['drafts']} drafts, for `{target}`"))
        rows.append(
            (
                "proposes",
                f"{draft_tokens:,} of {all_tokens:,} tokens" if draft_tokens else f"{all_tokens:,} tokens",
            )
        )
    if bits := card.details.get("bits_per_weight"):
        rows.append(("bits a weight", f"{bits:.2f}"))
    weights = (path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".gguf"))
    for path in (path for path in weights if single in ("", path.name)):
        rows.append((f"`{path.name}`", bytes_text(path.stat().st_size)))
    config = _config(folder)
    for key, label in (("max_position_embeddings", "context, tokens"), ("vocab_size", "vocabulary")):
        if isinstance(config.get(key), int):
            rows.append((label, f"{config[key]:,}"))
    return rows


def _commands(card: Card, folder: Path, single: str) -> Iterator[str]:
    """A paragraph with the command of each program that runs the model."""
    name, kind = card.name, _format(folder)
    ggufs = sorted(path.name for path in folder.glob("*.gguf") if path.name != "imatrix.gguf")
    if (folder / "adapter_config.json").is_file():
        yield f"A LoRA adapter: peft loads it, and `BASE+{name}` is a model in the YAML of `attar merge`."
        return
    if head := draft_head_of(_config(folder)):
        target = shlex.quote(_bare(head["target"]))
        yield "A draft head for speculative decoding: it runs with its model, and changes no completion."
        yield _block("attar", f"attar generate {target} --draft {name}\nattar serve {target} --draft {name}")
        return
    model = name if not ggufs else single if single else f"{name}/{ggufs[0]}"
    loader, task = _head(folder)
    encoder = task != "text-generation"
    generate = f'attar generate {model} "Once upon a time"\nattar serve {model}'
    if kind == "mlx":
        yield _block("mlx-lm", f'mlx_lm.generate --model {name} --prompt "Once upon a time"')
        return
    yield _block("attar", f"attar evaluate {model} --data whole:FILE" if encoder else generate)
    if ggufs:
        yield _block("llama.cpp", f"llama-cli -m {model}")
        if (folder / MODELFILE).is_file():
            file = f"{name}.{MODELFILE}" if single else f"{name}/{MODELFILE}"
            yield _block(
                "Ollama", f"ollama create {ollama_name(name)} -f {file}\nollama run {ollama_name(name)}"
            )
        return
    if kind in ("exl2", "exl3"):
        yield f"ExLlamaV{kind[-1]} loads the folder as it is."
        return
    loads = card.details.get("loads_in", {})
    yield _with_transformers(name, kind, str(loads.get("transformers", "yes")), loader)
    if encoder:
        return
    command = _ENGINES.get(kind, "vllm serve {name}").format(name=name)
    vllm = str(loads.get("vllm", ""))
    runs = not vllm or vllm.startswith(("yes", "nothing known", "with"))
    yield _block("vLLM", command) if runs else f"vLLM: {vllm}."


def _with_transformers(name: str, kind: str, loads: str, loader: str) -> str:
    if kind == "modelopt":
        return "transformers does not load this format."
    if not loads.startswith("yes"):
        return f"transformers: {loads}."
    package = _PACKAGES.get(kind)
    needs = f", with `pip install {package}`" if package else ""
    code = (
        f"from transformers import {loader}, AutoTokenizer\n"
        f'model = {loader}.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    )
    return f"transformers{needs}:\n\n```python\n{code}\n```"


def _measurements(card: Card) -> str:
    rows = [(_MEASURES.get(name, name), value) for name, value in _numbers(card.measurements)]
    return _table(
        [(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}") for name, value in rows]
    )


def _licence(card: Card) -> list[str]:
    """The licences that apply, and their duties."""
    via = {"signal": "through the outputs of", "weights": "through"}
    licences = [
        f"{source['title']}, {via[source['role']]} `{_bare(source['model'])}`"
        for source in card.licence.get("sources", ())
    ]
    accepted = [f"`{item['id']}` was accepted: {item['reason']}" for item in card.licence.get("accepted", ())]
    texts = [*card.licence.get("duties", ()), *card.licence.get("display", ())]
    return [*dict.fromkeys(licences), *accepted, *texts]


def _provenance(card: Card, single: str) -> str:
    lines = "\n".join(_lineage(card.parents, 0))
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    file = f"{Path(single).stem}.{CARD}" if single else CARD
    words = [word if not word.startswith("/") else Path(word).name for word in shlex.split(card.command)]
    return (
        f"{lines}\n\n```\n{shlex.join(words)}\n```\n\n"
        f"With {versions}. `attar inspect {single or card.name}` shows all of it; "
        f"`{file}` has it for programs."
    )


def _lineage(parents: Sequence[Parent], depth: int) -> Iterator[str]:
    for parent in parents:
        stage = "original" if parent.stage == "original" else f"made by `{parent.stage}`"
        role = ", a teacher" if parent.role == "signal" else ""
        yield f"{'  ' * depth}- `{_bare(parent.name)}`, {stage}{role}"
        yield from _lineage(parent.parents, depth + 1)


def root_names(parents: Sequence[Parent]) -> Iterator[str]:
    """The names of the models, which attar did not make, that the weights come from."""
    for parent in parents:
        if parent.role == "weights":
            yield from root_names(parent.parents) if parent.parents else (parent.name,)


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Numbers of nested measurements, by dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _library(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "peft"
    if draft_head_of(_config(folder)):
        return "attar"
    return "gguf" if any(folder.glob("*.gguf")) else "transformers"


def _head(folder: Path) -> tuple[str, str]:
    """The class that loads the model, and its task."""
    architecture = str((_config(folder).get("architectures") or [""])[0])
    known = (names for ending, names in _HEADS.items() if architecture.endswith(ending))
    return next(known, ("AutoModelForCausalLM", "text-generation"))


def _format(folder: Path) -> str:
    """The name of the stored format; empty for plain safetensors."""
    if any(folder.glob("*.gguf")):
        return "gguf"
    quantization = _config(folder).get("quantization_config")
    return str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def _bare(name: str) -> str:
    """A model's name without a revision, and without the folders of a path."""
    bare = name.partition("@")[0]
    return Path(bare).name if bare.startswith(("/", ".", "~")) else bare


def ollama_name(name: str) -> str:
    """A model name that Ollama accepts."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else ", ".join(names[:-1]) + f" and {names[-1]}"


def _block(program: str, command: str) -> str:
    return f"{program}:\n\n```sh\n{command}\n```"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
