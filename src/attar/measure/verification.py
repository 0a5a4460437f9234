"""The verb ``verify``: a finished file or folder, opened as engines open it, beside its original.

opened      config, names and shapes by the gate of all verbs; codes and scales by the format's reader;
            matrices that the config says are quantized and that are stored dense; a multi-token
            prediction head as whole as the original's; tokens of the tokenizer, chat template and generation
            config as the original's, whose tokens exist
measured    KL with its noise floor, flips in both directions, greedy answers and their length
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.companions import GENERATION
from attar.checkpoint.geometry import geometry
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.parts import part_of
from attar.checkpoint.tensors import check_finite
from attar.errors import AttarError, NumericsError
from attar.formats import compressed_tensors, gptq, modelopt
from attar.formats.readers import Decoded, quant_method, reader
from attar.measure.evaluate import Measurements, evaluate
from attar.measure.numbers import nats_with_interval, significant
from attar.measure.settings import EvaluateSettings, VerifySettings
from attar.models.anatomy.roles import is_linear
from attar.models.loading.empty import empty_model
from attar.models.loading.fit import admit
from attar.models.loading.load import load_tokenizer
from attar.models.loading.single_experts import single_experts
from attar.models.loading.stored import stored_names
from attar.models.mtp_head import load_mtp_head
from attar.progress import SILENT, Progress

ANSWER = 96
"""Tokens of an answer, at most."""
NAMES_DENSE = {compressed_tensors.METHOD: "ignore", gptq.METHOD: "dynamic", modelopt.METHOD: "ignore"}
"""Methods whose config names what is dense, and the field that does."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last names of Linears that engines keep dense whatever the config says."""
TOKENS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)
"""Keys whose values are tokens."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
UNFIT = ("half a head", "token without row", "absent tensor")
"""Oddities that other verbs pass over with a line."""
LENGTHS = 2.0
"""Times the original's answers that mean answers may be longer or shorter."""


@dataclass(frozen=True)
class Verification:
    """What was seen.

    Attributes:
        faults: why the files are not fit to be given to others, a sentence each; empty: they are.
    """

    model: str
    against: str
    faults: tuple[str, ...]
    measurements: Measurements

    @property
    def verdict(self) -> str:
        """One line: whether it is fit, the figures, and the first fault."""
        measured, parts = self.measurements, []
        if measured.kl_mean is not None:
            kl = nats_with_interval(measured.kl_mean, measured.kl_mean_row_stderr, 2)
            parts.append(f"KL {kl} nats (noise floor {significant(measured.kl_noise_floor, 2)})")
        if measured.tokens_lost is not None:
            parts.append(f"{measured.tokens_lost:.1%} of tokens lost and {measured.tokens_won:.1%} won")
        if measured.answers_length is not None:
            ours, theirs = measured.answers_length, measured.reference_answers_length
            parts.append(f"answers of {ours:.0f} tokens where {self.against} has {theirs:.0f}")
        more = f" and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
        start = f"not fit: {self.faults[0]}{more}; " if self.faults else "fit: "
        return start + ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        opened = {"model": self.model, "against": self.against, "fit": not self.faults}
        return {**self.measurements.to_dict(), **opened, "faults": list(self.faults), "verdict": self.verdict}


def verify(
    model: str | Path | Checkpoint,
    against: str | Path | Checkpoint,
    settings: VerifySettings | None = None,
    *,
    progress: Progress = SILENT,
) -> Verification:
    """Open a model as engines do, and measure it beside the one it was made from.

    Raises:
        AttarError: it cannot be opened at all, or its tokenizer has other tokens; names file and field.
    """
    settings = settings or VerifySettings()
    checkpoint = admit(open_checkpoint(model), progress)
    base = admit(open_checkpoint(against), progress)
    faults = [
        *(odd.text for odd in checkpoint.oddities if odd.what in UNFIT),
        *_misstated(checkpoint),
        *_half_head(checkpoint, base),
        *_damaged(checkpoint, progress),
        *_other_texts(checkpoint, base),
        *_absent_tokens(checkpoint),
    ]
    try:
        measured = evaluate(
            checkpoint,
            EvaluateSettings(
                data=settings.data,
                bos=settings.bos,
                tokens=settings.tokens,
                sample="",
                sample_tokens=ANSWER,
                speed=False,
                seed=settings.seed,
                device=settings.device,
            ),
            reference=base,
            progress=progress,
        )
    except NumericsError as error:
        if not faults:
            raise
        raise NumericsError(f"{checkpoint.path}: {faults[0]}", hint=error.hint) from error
    faults += _too_far(measured, settings)
    return Verification(checkpoint.spelling, base.spelling, tuple(faults), measured)


def _misstated(checkpoint: Checkpoint) -> Iterator[str]:
    """Matrices for which an engine makes quantized parameters, and which are stored dense; those of a
    multi-token prediction head too."""
    field, stored = NAMES_DENSE.get(quant_method(checkpoint) or ""), checkpoint.with_mtp
    if field is None:
        return
    read: Any = reader(stored)
    model = empty_model(
        {key: value for key, value in checkpoint.config.items() if key != "quantization_config"},
        unstacked=True,
    )
    names = stored_names(model, single_experts(Decoded(checkpoint)))
    linears = {names.get(f"{name}.weight") for name, module in model.named_modules() if is_linear(module)}
    others = frozenset(names.values()) - linears
    modules = (
        name.removesuffix(".weight")
        for name, info in stored.tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2 and part_of(name) != "embedding"
        if name not in others and not read.is_coded(name)
    )
    wrong = [module for module in modules if module.rpartition(".")[2] not in ROUTERS and read.covers(module)]
    if wrong:
        yield f"config.json: {field} lacks {wrong[0]}, which is stored dense ({len(wrong)} in all)"


def _half_head(checkpoint: Checkpoint, base: Checkpoint) -> Iterator[str]:
    """A multi-token prediction head that lacks modules of the original's, or that cannot be run where the
    original's can. One that is left out as a whole is no fault."""
    if not checkpoint.mtp:
        return
    ours, theirs = (_modules(Decoded(opened).mtp) for opened in (checkpoint, base))
    if lost := sorted(theirs - ours):
        yield f"its multi-token prediction head lacks {lost[0]} ({len(lost)} of {len(theirs)} modules)"
    elif (why := _unrunnable(checkpoint)) and not (base.mtp and _unrunnable(base)):
        yield f"its multi-token prediction head cannot be run: {why}"


def _unrunnable(checkpoint: Checkpoint) -> str:
    """Why a head cannot be run; empty: it can."""
    try:
        load_mtp_head(checkpoint)
    except AttarError as error:
        return error.message
    return ""


def _modules(names: Iterable[str]) -> frozenset[str]:
    """Modules of tensors; the experts of a mixture, which pruning removes, are one."""
    return frozenset(_EXPERT.sub(".experts.", name).rpartition(".")[0] for name in names)


def _damaged(checkpoint: Checkpoint, progress: Progress) -> Iterator[str]:
    """Codes and scales that cannot be right, of the multi-token prediction head too."""
    stored = checkpoint.with_mtp
    read = reader(stored)
    with progress.task("codes", total=len(stored.tensors)) as task:
        for name in stored.tensors:
            try:
                read.check(name)
                if name in checkpoint.mtp and not read.is_coded(name):  # no measurement runs it
                    check_finite(name, stored.load(name), checkpoint.path)
            except NumericsError as error:
                yield error.message
            task.advance()


def _other_texts(checkpoint: Checkpoint, base: Checkpoint) -> Iterator[str]:
    """What a user's texts meet, where it is not as the original has it."""
    ours, theirs = (getattr(load_tokenizer(opened), "chat_template", None) for opened in (checkpoint, base))
    if ours != theirs:
        yield f"its chat template is {'missing' if not ours else 'another one'}"
    stored, wanted = (_generation(opened.path) for opened in (checkpoint, base))
    other = sorted(key for key in stored.keys() | wanted if stored.get(key) != wanted.get(key))
    if other:
        values = json.dumps(stored.get(other[0])), json.dumps(wanted.get(other[0]))
        yield f"{GENERATION}: {other[0]} is {values[0]}, the original's {values[1]}"


def _absent_tokens(checkpoint: Checkpoint) -> Iterator[str]:
    """Token ids of the generation config that the model has no row for."""
    count = geometry(checkpoint.config, "float32").vocabulary
    for key, value in _generation(checkpoint.path).items():
        tokens = value if isinstance(value, list) else [value]
        absent = [token for token in tokens if not (token is None or token in range(count or 0))]
        if key in TOKENS and count and absent:
            yield f"{GENERATION}: {key} is {json.dumps(absent[0])}, but the model has {count} tokens"


def _generation(folder: Path) -> dict[str, Any]:
    file = folder / GENERATION
    content = read_json(file) if file.is_file() else {}
    return {
        key: value
        for key, value in content.items()
        if key not in ("transformers_version", "_from_model_config")
    }


def _too_far(measured: Measurements, settings: VerifySettings) -> Iterator[str]:
    """Figures that mean another model."""
    if measured.kl_mean is not None and not measured.kl_mean <= settings.max_kl:
        yield f"KL {significant(measured.kl_mean)} nats is above {settings.max_kl:g} (--max-kl)"
    ours, theirs = measured.answers_length, measured.reference_answers_length
    if ours is not None and theirs and not 1 / LENGTHS <= ours / theirs <= LENGTHS:
        yield f"answers have {ours:.0f} tokens, the original's {theirs:.0f}"
