"""Odd checkpoints, as people publish them, made of a tiny good one: what is odd, and what must become of it.

    OddFolders(tmp_path).odd("own head")       the folder of a model
    ODD["own head"].verdict                    works, note or refused; the note or refusal has ``words``

``reference`` names the folder whose logits in transformers a working model must have: a good one, or
"itself". ``apart`` has verbs in which the verdict is another one. ``tests/test_odd_models.py`` runs every
verb over all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny_models

WORKS, NOTE, REFUSED = "works", "note", "refused"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
QUERY, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "free": ("llama3", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "tied": ("smollm", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gemma": ("gemma", {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma3": ("gemma3", {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "neox": ("gpt_neox", {**SMALL, "tie_word_embeddings": False}),
    "equal heads": ("llama2", {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": False}),
}
"""Good models by name: family of tests/tiny_models.py, and changes of its config."""

Spoil = Callable[[Path], None]
TEXT = ("gptq", "wanda", "neurons", "layers", "distill", "recover", "evaluate", "generate", "serve")
"""Verbs that read or write text."""


@dataclass(frozen=True)
class OddModel:
    """A row.

    Attributes:
        spoil: makes the good model's folder odd.
        verdict: of all verbs that are not in ``apart``.
        good: the model that it is made of.
        reference: whose logits it has; None: ``good``.
    """

    spoil: Spoil
    verdict: str
    words: str = ""
    good: str = "free"
    reference: str | None = None
    apart: dict[str, tuple[str, str]] = field(default_factory=dict)

    def expected(self, verb: str) -> tuple[str, str]:
        """Verdict and words in a verb."""
        return self.apart.get(verb, (self.verdict, self.words))


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    """Change the tensors."""

    def spoil(folder: Path) -> None:
        stored = load_file(folder / SINGLE)
        changed = change(stored)
        write(folder / SINGLE, stored if changed is None else changed)

    return spoil


def write(file: Path, stored: dict[str, Tensor]) -> None:
    """A safetensors file; tensors that share memory are copied."""
    save_file({name: tensor.clone() for name, tensor in stored.items()}, file, metadata={"format": "pt"})


def config(**changes: Any) -> Spoil:
    """Set keys of config.json; ``...`` removes one."""
    return edited("config.json", **changes)


def edited(name: str, **changes: Any) -> Spoil:
    """Set keys of a JSON file."""

    def spoil(folder: Path) -> None:
        path = folder / name
        content = {**(json.loads(path.read_text()) if path.is_file() else {}), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return spoil


def both(*spoils: Spoil) -> Spoil:
    """One change behind the other."""

    def spoil(folder: Path) -> None:
        for each in spoils:
            each(folder)

    return spoil


def sharded(change: Callable[[Path, dict[str, str]], Any] = lambda folder, places: None) -> Spoil:
    """Two shards with an index, which ``change`` may change, and the shards too."""

    def spoil(folder: Path) -> None:
        stored = load_file(folder / SINGLE)
        names = sorted(stored)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        places = {}
        for number, half in enumerate(halves, 1):
            file = f"model-0000{number}-of-00002.safetensors"
            write(folder / file, {name: stored[name] for name in half})
            places |= dict.fromkeys(half, file)
        (folder / SINGLE).unlink()
        change(folder, places)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))

    return spoil


def moved(folder: Path, name: str, places: dict[str, str], value: Callable[[Tensor], Tensor] | None) -> None:
    """Write a tensor into the other shard: changed by ``value``; None: out of its own."""
    own = folder / places[name]
    other = next(folder / file for file in sorted(set(places.values())) if file != places[name])
    tensor = load_file(own)[name]
    write(other, {**load_file(other), name: tensor if value is None else value(tensor)})
    if value is None:
        write(own, {key: stored for key, stored in load_file(own).items() if key != name})


def prefixed(prefix: str) -> Spoil:
    """Put a prefix before every name."""
    return tensors(lambda stored: {prefix + name: tensor for name, tensor in stored.items()})


def noise(like: Tensor, seed: int = 9) -> Tensor:
    """A tensor of the same kind with other values."""
    return (torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.3).to(like.dtype)


def in_fp8(scales: bool) -> Callable[[dict[str, Tensor]], None]:
    """Weights of the layers as codes of FP8, with the scales of blocks or without."""

    def change(stored: dict[str, Tensor]) -> None:
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            if scales:
                stored[f"{name}_scale_inv"] = torch.ones(1, 1)

    return change


def packed(stored: dict[str, Tensor]) -> None:
    """One weight as GPTQ packs it."""
    weight = stored.pop(QUERY)
    base = QUERY.removesuffix(".weight")
    stored[f"{base}.qweight"] = torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)
    stored[f"{base}.scales"] = torch.ones(1, weight.shape[0])


def added_token(token: str, index: int, *, base: bool = False) -> Spoil:
    """Give the tokenizer a token of this number, in the vocabulary proper or added."""

    def spoil(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content["added_tokens"].append({**content["added_tokens"][0], "id": index, "content": token})
        if base:
            content["model"]["vocab"][token] = index
        path.write_text(json.dumps(content))

    return spoil


def without_tokenizer(folder: Path) -> None:
    """Remove the tokenizer's files."""
    for path in [*folder.glob("tokenizer*"), *folder.glob("special_tokens_map.json")]:
        path.unlink()


def code_files(folder: Path) -> None:
    """Python files, named by config.json and the tokenizer's settings."""
    (folder / "modeling_x.py").write_text("raise RuntimeError('code of a checkpoint was run')\n")
    config(auto_map={"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"})(folder)
    edited("tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_x.Slow", None]})(folder)


def renamed(old: str, new: str) -> Spoil:
    """Another name for a tensor."""
    return tensors(lambda stored: stored.update({new: stored.pop(old)}))


def without_head(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but the head."""
    return {name: tensor for name, tensor in stored.items() if name != HEAD}


def headless(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The body alone, as ``LlamaModel`` stores it."""
    return {name.removeprefix("model."): tensor for name, tensor in without_head(stored).items()}


NUMBERS: dict[str, dict[str, Any]] = {
    "a context of 2**62": {"max_position_embeddings": 2**62},
    "a context below 0": {"max_position_embeddings": -1},
    "a billion layers": {"num_hidden_layers": 10**9},
    "no layers": {"num_hidden_layers": 0},
    "half a width": {"hidden_size": 32.5},
    "a width in text": {"hidden_size": "32"},
    "no vocabulary": {"vocab_size": None},
    "true layers": {"num_hidden_layers": True},
    "heads in a list": {"num_attention_heads": [4, "4"]},
    "no KV heads": {"num_key_value_heads": 0},
    "a width that is no number": {"intermediate_size": float("nan")},
    "an epsilon that is no number": {"rms_norm_eps": float("nan")},
    "an endless epsilon": {"rms_norm_eps": float("inf")},
    "an angle of 0": {"rope_theta": 0},
    "a flag in text": {"tie_word_embeddings": "false"},
    "an end in text": {"eos_token_id": "</s>"},
    "scaling in text": {"rope_scaling": "linear"},
    "an unknown type": {"dtype": "float7"},
    "a quantization in text": {"quantization_config": "int4"},
}
"""Numbers of config.json that cannot be; the first key must be named."""

HEADLESS = (REFUSED, "LlamaModel")
ODD: dict[str, OddModel] = {
    # head and tie
    "own head": OddModel(
        both(tensors(lambda t: t.update({HEAD: noise(t[EMBEDDING])}))),
        NOTE,
        "values of its own",
        good="tied",
        reference="itself",
    ),
    "head twice": OddModel(tensors(lambda t: t.update({HEAD: t[EMBEDDING]})), WORKS, good="tied"),
    "no head": OddModel(tensors(without_head), REFUSED, "lm_head.weight"),
    "no head, no flag": OddModel(
        both(tensors(without_head), config(tie_word_embeddings=...)),
        REFUSED,
        "tie_word_embeddings is not set",
    ),
    "no flag": OddModel(config(tie_word_embeddings=...), WORKS),
    "no flag, tied by the family": OddModel(config(tie_word_embeddings=...), WORKS, good="gemma"),
    "no flag, own head": OddModel(
        both(tensors(lambda t: t.update({HEAD: noise(t[EMBEDDING])})), config(tie_word_embeddings=...)),
        WORKS,
        good="gemma",
        reference="itself",
        apart={"gguf": (REFUSED, "must be tied")},
    ),
    "embedding as head": OddModel(
        renamed(EMBEDDING, HEAD), NOTE, "stored as lm_head.weight alone", good="tied"
    ),
    "head of another name": OddModel(renamed("embed_out.weight", HEAD), WORKS, good="neox"),
    # names
    **{
        f"names with {prefix}": OddModel(prefixed(prefix), NOTE, prefix)
        for prefix in ("module.", "_orig_mod.", "base_model.model.", "language_model.", "module._orig_mod.")
    },
    "an adapter inside": OddModel(
        tensors(lambda t: t.update({QUERY.replace(".weight", ".lora_A.default.weight"): torch.ones(4, 32)})),
        REFUSED,
        "LoRA",
    ),
    "no head at all": OddModel(
        both(tensors(headless), config(architectures=["LlamaModel"])),
        WORKS,
        reference="",
        apart={
            **dict.fromkeys(("gguf", "generate", "serve", "evaluate"), HEADLESS),
            **dict.fromkeys(("distill", "recover"), HEADLESS),
        },
    ),
    # files
    "shards": OddModel(sharded(), WORKS),
    "an index entry without a tensor": OddModel(
        sharded(lambda folder, places: places.update({"mtp.fc.weight": places[NORM]})), NOTE, "mtp.fc.weight"
    ),
    "an index entry without a needed tensor": OddModel(
        both(
            sharded(
                lambda folder, places: write(
                    folder / places[NORM],
                    {k: v for k, v in load_file(folder / places[NORM]).items() if k != NORM},
                )
            )
        ),
        REFUSED,
        NORM,
    ),
    "a tensor in another shard": OddModel(
        sharded(lambda folder, places: moved(folder, NORM, places, None)), NOTE, NORM
    ),
    "a tensor that the index lacks": OddModel(sharded(lambda folder, places: places.pop(NORM)), WORKS),
    "a tensor twice": OddModel(
        sharded(lambda folder, places: moved(folder, NORM, places, lambda tensor: tensor)), NOTE, NORM
    ),
    "two versions of a tensor": OddModel(
        sharded(lambda folder, places: moved(folder, NORM, places, lambda tensor: tensor + 1)), REFUSED, NORM
    ),
    "two layouts": OddModel(
        lambda folder: (
            [shutil.copy(folder / SINGLE, folder / "keep"), sharded()(folder)]
            and (folder / "keep").rename(folder / SINGLE)
            and None
        ),
        NOTE,
        "the single file is read",
    ),
    "Mistral's file beside": OddModel(
        lambda folder: write(folder / "consolidated.safetensors", {"x": torch.ones(2)}), WORKS
    ),
    "Mistral's file alone": OddModel(
        lambda folder: (folder / SINGLE).rename(folder / "consolidated.safetensors") and None,
        REFUSED,
        "consolidated.safetensors",
        apart={"inspect": (REFUSED, "consolidated.safetensors")},
    ),
    "a pickle beside": OddModel(
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x") and None, WORKS
    ),
    # tensors
    "old frequencies": OddModel(
        tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})), WORKS
    ),
    "a tensor of no size": OddModel(
        tensors(lambda t: t.update({"model.layers.0.empty": torch.zeros(0, 4)})), REFUSED, "no place"
    ),
    "a bias in one layer": OddModel(
        tensors(lambda t: t.update({QUERY.replace("weight", "bias"): torch.ones(32)})), REFUSED, "no place"
    ),
    "float64": OddModel(tensors(lambda t: {name: x.double() for name, x in t.items()}), WORKS),
    "several types": OddModel(
        tensors(lambda t: {name: x.half().float() if x.dim() > 1 else x for name, x in t.items()}),
        WORKS,
        reference="itself",
    ),
    "multi-token prediction": OddModel(
        tensors(lambda t: t.update({"mtp.fc.weight": torch.ones(4, 4)})), NOTE, "mtp.fc.weight"
    ),
    "a layer behind the last": OddModel(
        both(
            tensors(lambda t: t.update({QUERY.replace("layers.1", "layers.2"): t[QUERY]})),
            config(num_nextn_predict_layers=1),
        ),
        NOTE,
        "layers.2",
    ),
    # shapes
    "more rows than tokens": OddModel(config(vocab_size=300), REFUSED, ""),
    "another width": OddModel(config(intermediate_size=96), REFUSED, "the config asks for"),
    "fewer layers": OddModel(config(num_hidden_layers=1), REFUSED, "no place"),
    "more layers": OddModel(config(num_hidden_layers=3), REFUSED, "no tensor for"),
    "no width of heads": OddModel(config(head_dim=...), WORKS),
    "no KV heads stated": OddModel(config(num_key_value_heads=...), WORKS, good="equal heads"),
    "other KV heads": OddModel(config(num_key_value_heads=...), REFUSED, "the config asks for"),
    "a width that the heads do not divide": OddModel(
        config(num_attention_heads=5, num_key_value_heads=5, head_dim=...), REFUSED, "heads"
    ),
    "layers that skip a number": OddModel(
        tensors(lambda t: {name.replace("layers.1.", "layers.2."): x for name, x in t.items()}),
        REFUSED,
        "no tensor for model.layers.1.",
    ),
    "a class of another family": OddModel(config(model_type="qwen3"), REFUSED, "q_norm"),
    "a head that is not finite": OddModel(
        tensors(lambda t: {name: x / 0 if name == HEAD else x for name, x in t.items()}),
        REFUSED,
        HEAD,
        apart={"inspect": (WORKS, "")},
    ),
    # codes
    "FP8 with scales": OddModel(tensors(in_fp8(True)), REFUSED, "no quantization_config"),
    "FP8 without scales": OddModel(tensors(in_fp8(False)), REFUSED, "no quantization_config"),
    "packed codes": OddModel(tensors(packed), REFUSED, "no quantization_config"),
    "integers": OddModel(tensors(lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})), REFUSED, "I8"),
    "codes of bitsandbytes": OddModel(
        tensors(lambda t: t.update({f"{QUERY}.absmax": torch.ones(4)})), REFUSED, "no quantization_config"
    ),
    "an unknown method": OddModel(
        both(tensors(in_fp8(True)), config(quantization_config={"quant_method": "fp8"})), REFUSED, "'fp8'"
    ),
    "a method without codes": OddModel(
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        NOTE,
        "no tensor holds codes",
    ),
    # tokenizer
    "a pad behind the rows": OddModel(added_token("<extra>", 320), NOTE, "<extra>"),
    "another vocabulary": OddModel(added_token("<extra>", 5000, base=True), REFUSED, "token 5000"),
    "no tokenizer": OddModel(
        without_tokenizer,
        WORKS,
        apart={verb: (REFUSED, "no tokenizer") for verb in TEXT if verb != "serve"}
        | {"gguf": (REFUSED, "tokenizer")},
    ),
    "a tokenizer of an unknown class": OddModel(
        edited("tokenizer_config.json", tokenizer_class="NovelTokenizerFast"), WORKS
    ),
    "a tokenizer of Python code": OddModel(
        both(
            edited(
                "tokenizer_config.json", tokenizer_class="Slow", auto_map={"AutoTokenizer": ["x.Slow", None]}
            ),
            lambda folder: (folder / "tokenizer.json").unlink(),
        ),
        REFUSED,
        "Python code",
    ),
    # config.json
    "empty parts": OddModel(config(text_config=None, quantization_config={}), WORKS),
    "an unknown activation": OddModel(config(hidden_act="novel"), REFUSED, "hidden_act"),
    "an unknown scaling": OddModel(
        config(rope_parameters=..., rope_theta=10000.0, rope_scaling={"rope_type": "novel", "factor": 2.0}),
        REFUSED,
        "rope_type",
    ),
    "code files": OddModel(code_files, WORKS),
    "a pad without a row": OddModel(config(pad_token_id=320), NOTE, "pad_token_id"),
    "ends without rows": OddModel(config(eos_token_id=[0, 9999]), NOTE, "eos_token_id"),
    "a pad below 0": OddModel(config(pad_token_id=-1), WORKS),
    "an older spelling of scaling": OddModel(
        config(rope_parameters=..., rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0}),
        WORKS,
        reference="itself",
    ),
    "scaling without a factor": OddModel(
        config(rope_parameters=..., rope_theta=10000.0, rope_scaling={"type": "linear", "factor": None}),
        REFUSED,
        "factor",
    ),
    "a cap that Gemma 3 does not apply": OddModel(
        config(attn_logit_softcapping=0.05), WORKS, good="gemma3", apart={"gguf": (REFUSED, "softcapping")}
    ),
    "the older name of the type": OddModel(config(dtype=..., torch_dtype="float32"), WORKS),
    **{name: OddModel(config(**changes), REFUSED, next(iter(changes))) for name, changes in NUMBERS.items()},
}


class OddFolders:
    """The models below a folder, each written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def good(self, name: str) -> Path:
        """A good model."""
        folder, (family, changes) = self.root / "good" / name, GOOD[name]
        if not folder.exists():
            tiny_models.save(tiny_models.build(family, **changes), folder)
        return folder

    def odd(self, name: str) -> Path:
        """An odd one."""
        folder = self.root / "odd" / name
        if not folder.exists():
            shutil.copytree(self.good(ODD[name].good), folder)
            ODD[name].spoil(folder)
        return folder

    def reference(self, name: str) -> Path:
        """The model whose logits in transformers an odd one has."""
        odd = ODD[name]
        return self.odd(name) if odd.reference == "itself" else self.good(odd.reference or odd.good)
