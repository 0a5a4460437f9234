"""How a model runs, and which runner a checkpoint gets: the compiled step, else transformers' modules.

The compiled step is the default where it keeps the weights as they are stored, bfloat16 or codes, and
supports all settings. The reason against it is one sentence: ``Loaded.why`` has it, ``runner="compiled"``
raises it, and it is logged as a warning where the slower modules were not asked for.
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
from attar.models.loading.device import pick_device
from attar.runtime.kv.evict import Eviction
from attar.runtime.runner.compiled import KV_DTYPES
from attar.runtime.runner.compiled_weights import check_config
from attar.runtime.runner.convolution_weights import FAMILIES as CONVOLUTIONS
from attar.runtime.runner.device.runner import KV_DTYPES as DEVICE_KV_DTYPES
from attar.runtime.runner.expert_weights import is_router
from attar.runtime.runner.latent_weights import FAMILIES as LATENTS
from attar.runtime.runner.recurrent_weights import FAMILIES as RECURRENT
from attar.runtime.runner.step_config import step_config

RUNNERS = ("auto", "compiled", "device", "modules")
WEIGHTS = ("int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTIVATIONS = ("auto", 16, 8)


@dataclass(frozen=True)
class RunnerSettings:
    """How a model is loaded and run.

    Args:
        runner: compiled, device, modules, or auto: compiled on a CPU, and device on a GPU, where it keeps the
            weights as they are stored and supports all other settings (docs/runtime.md), else modules. device
            on a CPU is what the GPU's kernels are compared with: slow.
        dtype: float32, bfloat16, float16, or auto: float32 on a CPU, the checkpoint's own elsewhere.
        device: cpu, cuda or cuda:0.
        kv_dtype: format of keys and values, a name of ``kv.store.STORES``; auto: the model's dtype.
        kv_tokens: tokens that the KV cache holds; None: what 1 GiB holds, at most 16 contexts.
        block_size: tokens of a block, the unit of sharing.
        eviction: bounds the cache entries of each sequence, an object of ``kv.evict``; None: no bound.
        weights: int8 or int4: dense weights are rounded while they are loaded, by the compiled or the device
            runner.
        activations: bits of the inputs of products with packed weights: 16, 8, or auto: 16 where the
            processor has instructions for it, else 8 (docs/runtime.md).
        hidden_layers: layers whose hidden states a draft head will read; the default of ``kv_tokens`` counts
            them.
        adapters: it may have LoRA adapters.

    Raises:
        SettingsError: a setting out of range.
    """

    runner: str = "auto"
    dtype: str = "auto"
    device: str = "cpu"
    kv_dtype: str = "auto"
    kv_tokens: int | None = None
    block_size: int = 16
    eviction: Eviction | None = None
    weights: str | None = None
    activations: int | str = "auto"
    hidden_layers: tuple[int, ...] = ()
    adapters: bool = False

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "runner": RUNNERS,
            "dtype": DTYPES,
            "weights": (None, *WEIGHTS),
            "activations": ACTIVATIONS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                names = [str(value) for value in allowed if value]
                raise SettingsError(name, getattr(self, name), ", ".join(names[:-1]) + f" or {names[-1]}")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise SettingsError("kv_tokens", self.kv_tokens, "at least 1")
        if self.block_size < 1:
            raise SettingsError("block_size", self.block_size, "at least 1")
        if self.weights and self.runner == "modules":
            raise SettingsError("runner", "modules", f"compiled for weights={self.weights!r}")

    @property
    def on_device(self) -> bool:
        """Whether the device runner is asked first: by name, or on a GPU."""
        return self.runner == "device" or (self.runner == "auto" and pick_device(self.device).type == "cuda")

    @property
    def bits(self) -> int:
        """Bits of the activations."""
        return default_activation_bits() if self.activations == "auto" else int(self.activations)


def why_not_compiled(checkpoint: Any, settings: RunnerSettings) -> str:
    """Why the compiled step does not run a checkpoint; empty where it does. Reads no weights, and builds the
    kernels where they are not built."""
    if settings.runner == "modules":
        return "modules were asked for"
    return _setting(settings) or _model(checkpoint, settings) or _machine()


def why_not_device(checkpoint: Any, settings: RunnerSettings) -> str:
    """Why the device runner does not run a checkpoint; empty where it does. Reads no weights."""
    if settings.kv_dtype not in ("auto", *DEVICE_KV_DTYPES):
        return f"kv_dtype is {settings.kv_dtype}, and it keeps {' or '.join(DEVICE_KV_DTYPES)}"
    for families, layers in (
        (LATENTS, "attention of latents (MLA)"),
        (CONVOLUTIONS, "short convolutions"),
        (RECURRENT, "linear recurrences"),
    ):
        if checkpoint.config.get("model_type") in families:
            return f"it has {layers}, which only the compiled step and modules run"
    return _evicting(settings) or _family(checkpoint) or _codes(Decoded(checkpoint), settings)


def _setting(settings: RunnerSettings) -> str:
    if pick_device(settings.device).type != "cpu":
        return f"the device is {settings.device}, and it runs on the CPU"
    if settings.dtype not in ("auto", "bfloat16"):
        return f"dtype is {settings.dtype}, and it computes with bfloat16 or packed weights"
    if settings.kv_dtype not in ("auto", *KV_DTYPES):
        return f"kv_dtype is {settings.kv_dtype}, and it keeps {' or '.join(KV_DTYPES)}"
    if settings.block_size % TILE:
        return f"block_size is {settings.block_size}, and it takes multiples of {TILE}"
    return _evicting(settings)


def _evicting(settings: RunnerSettings) -> str:
    if settings.eviction is None:
        return ""
    return f"{type(settings.eviction).__name__} evicts keys and values, which only modules do"


def _family(checkpoint: Any) -> str:
    try:
        check_config(step_config(checkpoint))
    except ModelError as problem:
        return problem.message
    return ""


def _codes(view: Decoded, settings: RunnerSettings) -> str:
    if not any(view.is_coded(name) for name in view.tensors):
        return ""
    if settings.adapters:
        return "weights are stored as codes, to which only modules add LoRA adapters"
    if settings.weights:
        return f"weights is {settings.weights}, but the checkpoint is quantized already"
    return ""


def _model(checkpoint: Any, settings: RunnerSettings) -> str:
    view = Decoded(checkpoint)
    reason = _family(checkpoint) or _codes(view, settings)
    if settings.kv_dtype == "int4" and checkpoint.config.get("model_type") in LATENTS:
        reason = "kv_dtype is int4, in which it keeps no latents (MLA)"
    packed = any(view.is_coded(name) for name in view.tensors)
    if reason or packed or settings.weights or settings.dtype == "bfloat16":
        return reason
    for info in view.tensors.values():
        if len(info.shape) > 1 and info.dtype != "BF16" and not is_router(info.name):
            return f"{info.name} is {info.dtype}, which bfloat16 would round; dtype='bfloat16' allows it"
    return ""


def _machine() -> str:
    return "" if library() is not None else f"there are no compiled kernels here: {why_missing('decode')}"
