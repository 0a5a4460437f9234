"""Measured sensitivities on disk, one JSON file for each model, text, amount of text and seed:

    {"format": "attar sensitivity", "version": 3,
     "key": {"model": fingerprint, "data", "tokens", "sequence_length", "seed", "precision"},
     "measurements": [{"group", "modules": [names],
                       "option": name, "definition": the change in full,
                       "bits": stored bits of the group, "weights": their number,
                       "kl": nats a token (null: infinite),
                       "output_error": ||(W - W') x||^2 / ||W x||^2 over the group}, ...]}

A measurement is found by its group, modules, option and definition: integer mixes, GGUF type mixes, EXL2
targets and sparsities can share a file, and an option that changed under its old name is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_json
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError, ModelError

FORMAT, VERSION = "attar sensitivity", 3


@dataclass(frozen=True)
class SensitivityKey:
    """What a file of measurements belongs to.

    Attributes:
        data: name (or fingerprint) of the text.
        tokens: number of tokens that were run.
        seed: of the choice of text.
        precision: ``fp32``, or ``bf16`` for arithmetic in bf16 (autocast), whose noise hides small KLs.
    """

    model: str
    data: str
    tokens: int
    sequence_length: int
    seed: int
    precision: str = "fp32"

    def file_name(self) -> str:
        """The name of the file."""
        return f"sensitivity-{sha256_text(canonical_json({**asdict(self), 'version': VERSION}))[:16]}.json"


@dataclass(frozen=True)
class Measurement:
    """One group, changed in one way.

    Attributes:
        option: short name of the change, such as a scheme or a sparsity.
        definition: the change in full: the grid and how weights were rounded to it, say.
        bits: stored bits of the group, scales included; zeros count nothing.
        weights: number of the group's weights.
        kl: nats a token; infinite when the model's output was not finite.
        output_error: relative squared error of the group's outputs.
    """

    group: str
    modules: tuple[str, ...]
    option: str
    definition: str
    bits: int
    weights: int
    kl: float
    output_error: float

    @property
    def identity(self) -> tuple[str, tuple[str, ...], str, str]:
        """Group, modules, option and definition."""
        return self.group, self.modules, self.option, self.definition


def read(file: Path, key: SensitivityKey | None = None) -> list[Measurement]:
    """The measurements of a file.

    Raises:
        CheckpointError: the file is of another kind, or is damaged.
        ModelError: its key is not ``key``; names the difference.
    """
    content = read_json(file)
    hint = "delete it to measure again"
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{file}: not a file of sensitivities, version {VERSION}", hint=hint)
    try:
        stored = SensitivityKey(**content["key"])
        measurements = [_from_json(entry) for entry in content["measurements"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: a measurement is incomplete: {error}", hint=hint) from error
    if key is not None and stored != key:
        wrong = [name for name, value in asdict(key).items() if asdict(stored)[name] != value]
        raise ModelError(
            f"{file}: was measured with another {', '.join(wrong)}",
            hint="give another file, or delete this one",
        )
    return measurements


def write(file: Path, key: SensitivityKey, measurements: Sequence[Measurement]) -> None:
    """Replace the file; infinite numbers become null."""
    entries = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(measurement).items()
        }
        for measurement in measurements
    ]
    write_json(file, {"format": FORMAT, "version": VERSION, "key": asdict(key), "measurements": entries})


def _from_json(entry: Mapping[str, Any]) -> Measurement:
    kl = math.inf if entry["kl"] is None else float(entry["kl"])
    error = math.inf if entry["output_error"] is None else float(entry["output_error"])
    return Measurement(**{**entry, "modules": tuple(entry["modules"]), "kl": kl, "output_error": error})
