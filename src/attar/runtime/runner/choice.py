"""Which runner a checkpoint gets: the compiled step where it may run it, else transformers' modules.

The compiled step is taken by itself where it holds the weights as the file has them, bfloat16 or codes, and
does all that was asked for. Every reason against it is one sentence, which ``Loaded.why`` keeps,
``runner="compiled"`` raises, and a warning says where the slower modules were not asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attar.errors import ModelError, SettingsError
from attar.formats.readers import Decoded
from attar.kernels.build import why_missing
from attar.kernels.decode import TILE
from attar.kernels.product import default_activation_bits
from attar.kernels.structures import library
from attar.models.device import pick_device
from attar.runtime.kv.evict import Eviction
from attar.runtime.runner.compiled import KV_DTYPES
from attar.runtime.runner.compiled_weights import check_config
from attar.runtime.runner.step_config import step_config

RUNNERS = ("auto", "compiled", "modules")
WEIGHTS = ("int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTIVATIONS = ("auto", 16, 8)


@dataclass(frozen=True)
class RunnerSettings:
    """What a runner shall do; see :class:`attar.runtime.llm.LLM`.

    Raises:
        SettingsError: a setting out of range.
    """

    runner: str = "auto"
    dtype: str = "auto"
    device: str = "cpu"
    kv_dtype: str = "auto"
    block_size: int = 16
    eviction: Eviction | None = None
    weights: str | None = None
    activations: int | str = "auto"

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "runner": RUNNERS,
            "dtype": DTYPES,
            "weights": (None, *WEIGHTS),
            "activations": ACTIVATIONS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                words = [str(each) for each in allowed if each]
                raise SettingsError(name, getattr(self, name), ", ".join(words[:-1]) + f" or {words[-1]}")
        if self.block_size < 1:
            raise SettingsError("block_size", self.block_size, "at least 1")
        if self.weights and self.runner == "modules":
            raise SettingsError("runner", "modules", f"compiled for weights={self.weights!r}")

    @property
    def bits(self) -> int:
        """Of activations."""
        return default_activation_bits() if self.activations == "auto" else int(self.activations)


def obstacle(checkpoint: Any, asked: RunnerSettings) -> str:
    """Why the compiled step does not run a checkpoint; empty where it does. Reads no weights, and builds the
    kernels if they are not built yet."""
    if asked.runner == "modules":
        return "modules were asked for"
    return _setting(asked) or _model(checkpoint, asked) or _machine()


def _setting(asked: RunnerSettings) -> str:
    if pick_device(asked.device).type != "cpu":
        return f"the device is {asked.device}, and it runs on the CPU"
    if asked.dtype not in ("auto", "bfloat16"):
        return f"dtype is {asked.dtype}, and it computes with bfloat16 or packed weights"
    if asked.kv_dtype not in ("auto", *KV_DTYPES):
        return f"kv_dtype is {asked.kv_dtype}, and it keeps {' or '.join(KV_DTYPES)}"
    if asked.eviction is not None:
        return f"{type(asked.eviction).__name__} evicts keys and values, which only modules do"
    if asked.block_size % TILE:
        return f"block_size is {asked.block_size}, and it takes multiples of {TILE}"
    return ""


def _model(checkpoint: Any, asked: RunnerSettings) -> str:
    try:
        check_config(step_config(checkpoint))
    except ModelError as problem:
        return problem.message
    view = Decoded(checkpoint)
    packed = any(view.is_coded(name) for name in view.tensors)
    if packed and asked.weights:
        return f"weights is {asked.weights}, but the checkpoint is quantized already"
    if packed or asked.weights or asked.dtype == "bfloat16":
        return ""
    for info in view.tensors.values():
        if len(info.shape) == 2 and info.dtype != "BF16":
            return f"{info.name} is {info.dtype}, which bfloat16 would round; dtype='bfloat16' allows it"
    return ""


def _machine() -> str:
    return "" if library() is not None else f"there are no compiled kernels here: {why_missing('decode')}"
