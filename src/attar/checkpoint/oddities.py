"""What is odd about checkpoints that people publish, and what becomes of each: the one table that all verbs
ask.

What config.json and the headers tell is judged when a checkpoint is opened
(:mod:`attar.checkpoint.normal_form`), and what needs the family or the tokenizer before the first work of a
verb (:mod:`attar.models.loading.fit`). A ``note`` is printed
once by each verb; ``refused`` is an error before anything is written, which ``attar inspect`` shows; what
``works`` needs no word.

Where transformers computes with an odd checkpoint, so does attar, and with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.errors import AttarError, CheckpointError, ModelError

WORKS, NOTE, REFUSED = "works", "note", "refused"


@dataclass(frozen=True)
class OddityRule:
    """A row of the table.

    Attributes:
        verdict: works, note or refused.
        words: what is odd, and what is done about it; braces are filled in.
        hint: how to mend it.
        file: of a folder, where it is.
    """

    verdict: str
    words: str
    hint: str = ""
    file: str = ""


ANOTHER_VERSION = "index and shards are of different versions; copy them again"
ANOTHER_MODEL = "config.json belongs to another model"

ODDITIES: dict[str, OddityRule] = {
    # files and names of tensors
    "two layouts": OddityRule(NOTE, "model.safetensors and an index with shards: the single file is read"),
    "absent tensor": OddityRule(
        NOTE, "the index names {tensor}, which no shard has: passed over, as the model does without", ""
    ),
    "other shard": OddityRule(
        NOTE, "{tensor} is in {file}, and not in {stated} as the index says: read there"
    ),
    "unlisted tensor": OddityRule(WORKS, "a shard has a tensor that the index does not name"),
    "tensor twice": OddityRule(NOTE, "{tensor} is in {file} and, the same, in {other}"),
    "two versions": OddityRule(
        REFUSED, "tensor {tensor!r} is in {file} and, with other values, in {other}", ANOTHER_VERSION
    ),
    "wrapped names": OddityRule(NOTE, "its tensors' names have {prefix!r} of a training library: left out"),
    "half a head": OddityRule(
        NOTE, "{tensor} is half a multi-token prediction head, without {missing}: left out"
    ),
    "nextn blocks": OddityRule(
        NOTE, "{tensor} predicts tokens after the next, which attar does not read from GGUF: left out"
    ),
    "adapter inside": OddityRule(
        REFUSED,
        "{tensor} is a part of a LoRA adapter that is not merged",
        "save the model after merge_and_unload(), or give MODEL+ADAPTER in a merge",
    ),
    # the head and its tie
    "own head": OddityRule(
        NOTE, "tie_word_embeddings is true, but {head} is stored with values of its own: they are used"
    ),
    "head twice": OddityRule(WORKS, "a tied head is stored a second time"),
    "head for embedding": OddityRule(
        NOTE, "the tied embedding is stored as {head} alone: read as {embedding}, too"
    ),
    "no head": OddityRule(
        REFUSED,
        "no tensor {head}, and tie_word_embeddings is {flag}",
        "copy the head too; or set tie_word_embeddings to true where the model was trained so",
    ),
    "headless class": OddityRule(
        REFUSED,
        "is a {architecture}, which does not predict next tokens",
        "this needs a language model with its head, such as a ...ForCausalLM",
    ),
    # codes
    "codes without config": OddityRule(
        REFUSED,
        "tensor {tensor} ({dtype}) is of a quantized weight, but config.json has no quantization_config",
        "the codes of a quantized model need the config.json that was published with them",
    ),
    "config without codes": OddityRule(
        NOTE, "quantization_config names {method}, but no tensor holds codes: read as a dense model"
    ),
    "mlx family": OddityRule(
        REFUSED,
        "is quantized by MLX, which attar does not read of {family}",
        "attar reads MLX folders of {families}; else start from the published model",
    ),
    "mlx twice": OddityRule(
        REFUSED,
        "{tensor} is stored twice, alone and in a stack of all experts",
        "convert the model again with mlx_lm.convert",
    ),
    # config.json
    "number": OddityRule(
        REFUSED, "{key} is {value}, but must be {allowed}", "the file is damaged, or made so", "config.json"
    ),
    "too many layers": OddityRule(
        REFUSED, "config.json says {layers} layers, but there are {tensors} tensors", ANOTHER_MODEL
    ),
    "token without row": OddityRule(NOTE, "{key} is {value}, but the embedding has {rows} rows: left out"),
    "code files": OddityRule(WORKS, "config.json names Python files, but transformers has the family itself"),
    # tensors and the architecture
    "misfit": OddityRule(REFUSED, "{reason}", "{hint}"),
    "passed over": OddityRule(NOTE, "{tensor} is no part of a {architecture}, and changes nothing"),
    # the tokenizer
    "token beyond the rows": OddityRule(
        NOTE, "the tokenizer has {token!r} ({id}), but the embedding has {rows} rows: no text may have it"
    ),
    "other vocabulary": OddityRule(
        REFUSED,
        "the tokenizer has token {id}, {token!r}, but config.json's vocab_size is {rows}",
        "the tokenizer belongs to another model",
    ),
}


@dataclass(frozen=True)
class Oddity:
    """An oddity of one checkpoint.

    Attributes:
        what: its name in :data:`ODDITIES`.
        text: its words, filled in.
        hint: filled in, too.
    """

    what: str
    text: str
    hint: str = ""

    @property
    def verdict(self) -> str:
        """Of the table."""
        return ODDITIES[self.what].verdict

    def error(self, where: Path | str) -> AttarError:
        """The refusal."""
        file = ODDITIES[self.what].file
        where = Path(where) / file if file and Path(where).is_dir() else where
        kind, joint = (ModelError, " ") if self.text.startswith("is ") else (CheckpointError, ": ")
        return kind(f"{where}{joint}{self.text}", hint=self.hint or None)


def oddity(what: str, **facts: Any) -> Oddity:
    """An oddity with its words filled in."""
    row = ODDITIES[what]
    return Oddity(what, row.words.format(**facts), row.hint.format(**facts))
