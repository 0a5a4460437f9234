"""Settings of export."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.units import byte_count
from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.options import check_choices, setting
from attar.patterns import RegexError, check
from attar.quantization.settings import AUTO_BITS, TUNE_TOKENS, tuning_rows, tuning_steps
from attar.walks.settings import check_range

VERSION = 5

FORMATS = (
    "dense",
    "compressed-tensors",
    "gguf",
    "gptq",
    "awq",
    "bitsandbytes",
    "modelopt",
    "mxfp4",
    "exl2",
    "exl3",
    "mlx",
    "speculators",
    "deepspec",
    "eagle",
    "medusa",
)
HEAD_FORMATS = ("speculators", "deepspec", "eagle", "medusa")
"""Layouts of draft heads."""
DTYPES = ("auto", "bfloat16", "float16", "float32")
AUTO_ROWS = 8  # sequences of an automatic importance matrix: more gain nothing (docs/export.md)
WIDE = ("AUTO", "F32", "F16", "BF16", "Q8_0")  # types without an automatic importance matrix
GGUF = ".gguf"
GGUF_OPTIONS = ("type", "size", "rounding", "effort", "overrides", "pretokenizer", "max_file", "imatrix")
"""Options of format gguf alone."""
MLX_TYPES = ("mxfp4", "nvfp4", "mxfp8")
MLX_BITS, MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
EXL3_BITS = tuple(range(1, 9))
USUAL_TYPE = "Q4_K_M"
ROUNDINGS = ("nearest", "gptq", "gptaq", "qronos", "yaqa", "autoround")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Write a checkpoint for another engine, and read it back to be sure that it will load there."""

    format: str = setting(
        "compressed-tensors",
        "dense: ordinary safetensors; gguf: llama.cpp, also where OUT is a file NAME.gguf; "
        "compressed-tensors, gptq, awq, bitsandbytes: transformers and vLLM; modelopt: TensorRT-LLM and "
        "vLLM; mxfp4: gpt-oss as it is published; exl2, exl3: ExLlamaV2 and V3; mlx: mlx-lm on Macs; "
        "draft heads: speculators: vLLM; "
        "deepspec: vLLM, SGLang, llama.cpp; eagle: SGLang, vLLM, EAGLE; medusa: Medusa",
        choices=FORMATS,
    )
    dtype: str = setting(
        "auto",
        "dense, mlx: number type of the tensors; auto: as stored, and bfloat16 for a GGUF "
        "file with quantized blocks; float32 keeps their decoded values exactly",
        choices=DTYPES,
    )
    type: str = setting(
        "auto",
        "gguf: a mix or one type: Q4_K_M, Q6_K, Q8_0, F16 ...; auto: what the checkpoint "
        "holds, its codes untouched, dense tensors as they are; mlx: mxfp4, nvfp4 or mxfp8 for what is "
        "dense",
    )
    bits: float = setting(
        0.0,
        "gguf, exl2: average stored bits a weight; each tensor's type is chosen by its measured "
        "sensitivity. 0: off; exl3: bits of every Linear, 1 to 8; mlx: bits of what is dense, 2, 3, 4, "
        "5, 6 or 8; 0: 4 for a dense checkpoint, else it stays dense",
    )
    group_size: int = setting(0, "mlx: inputs that share a scale; 0: 64", choices=(0, 32, 64, 128))
    size: str = setting("", "gguf: the same with the size of the file, such as 4.5GB; empty: off")
    rounding: str = setting(
        "nearest",
        "gguf: how weights are rounded on the types' grids; all but nearest run the "
        "calibration text through the model",
        choices=ROUNDINGS,
    )
    effort: str = setting(
        "auto",
        "gguf: time for quality at the same bytes: good, best: behind any rounding the blocks' "
        "float16 scales, norms and biases learn end to end from the original, on 32,768 or 131,072 tokens; "
        "fast: none; auto: good behind a rounding that reads text where most weights have 3 bits, "
        "else fast",
        choices=("auto", *TUNE_TOKENS),
    )
    imatrix: str = setting(
        "auto",
        "gguf: importance of each input for the search of scales: a file of llama.cpp's; "
        "compute: from the calibration text; none; auto: from its first sequences, with rounding nearest "
        "and types below 8 bits (the other roundings see the inputs themselves)",
    )
    overrides: tuple[str, ...] = setting(
        (), "gguf: PATTERN=TYPE for some tensors, by a regular expression on llama.cpp's names"
    )
    pretokenizer: str = setting(
        "", "gguf: llama.cpp's name of the tokenizer's splitting rule, where it is not recognised"
    )
    max_file: str = setting("", "gguf: split into files of this size, such as 40GB; empty: one file")
    target: str = setting(
        "", "draft heads: the model that the head drafts for, where its folder names none that is here"
    )
    head_bits: int = setting(6, "exl2, exl3: bits of the head", choices=(6, 8, 16))
    samples: int = setting(128, "calibration sequences, where a rounding needs them")
    sequence_length: int = setting(512, "tokens in a calibration sequence, at most the context")
    batch_size: int = setting(8, "sequences at once")
    data: str = data_field()
    bos: str = bos_field()
    precision: str = setting(
        "auto",
        "of the passes over the calibration text; auto: bf16 where the device has it",
        choices=("auto", "fp32", "bf16"),
    )
    device: str = setting("auto", "cpu, cuda, cuda:0; auto: a GPU where there is one")
    seed: int = setting(0, "of the choice of calibration text")

    def __post_init__(self) -> None:
        check_text(self)
        check_choices(self)
        check_range("bits", self.bits, 0.0, 16.0, "0 (off), or up to 16")
        for name in ("samples", "sequence_length", "batch_size"):
            check_range(name, getattr(self, name), 1, 10**9, "at least 1")
        self._check_format()
        for name in ("size", "max_file"):
            byte_count(name, getattr(self, name))
        for text in self.overrides:
            _check_override(text)

    @property
    def importance_rows(self) -> int:
        """Calibration sequences that an importance matrix is computed from; 0: none is computed."""
        if self.format != "gguf" or self.imatrix not in ("auto", "compute"):
            return 0
        if self.imatrix == "compute":
            return self.samples
        rounds = self.rounding == "nearest" and (self.bits or self.size or self.type.upper() not in WIDE)
        return min(self.samples, AUTO_ROWS) if rounds else 0

    @property
    def most_steps(self) -> int:
        """Steps of tuning, at most: of effort auto the bits of most weights decide, which a type names."""
        effort = self.effort
        if effort == "auto":
            bits = re.search(r"\d+", self.type)
            low = bits is None or int(bits[0]) <= AUTO_BITS
            effort = "good" if low and self.rounding != "nearest" else "fast"
        return tuning_steps(effort, self.sequence_length)

    @property
    def tuning_rows(self) -> int:
        """Sequences that tuning reads, at most."""
        return tuning_rows(self.most_steps, self.sequence_length)[2]

    @property
    def calibration_rows(self) -> int:
        """Calibration sequences that are run through the model; 0: none."""
        sized = self.format != "mlx" and (self.bits or self.size)
        reads = self.format in ("exl2", "exl3") or self.rounding != "nearest" or sized
        return self.samples if reads else self.importance_rows

    @property
    def text_rows(self) -> int:
        """Sequences that are read, at most: tuning takes those after ``samples``."""
        return self.samples + self.tuning_rows if self.tuning_rows else self.calibration_rows

    def _check_format(self) -> None:
        """Refuse a setting that the format would ignore."""
        gguf = {"type": "auto", "size": "", "rounding": "nearest", "overrides": ()}
        gguf |= {"pretokenizer": "", "max_file": "", "effort": "auto"}
        if self.format != "gguf":
            if self.imatrix not in ("auto", "none", ""):
                raise SettingsError("imatrix", self.imatrix, f"auto with format {self.format}: it is gguf's")
            for name, default in gguf.items():
                if getattr(self, name) != default and (self.format, name) != ("mlx", "type"):
                    raise SettingsError(
                        name, getattr(self, name), f"unset with format {self.format}: it is gguf's"
                    )
        if self.format not in ("gguf", "exl2", "exl3", "mlx") and self.bits:
            raise SettingsError(
                "bits", self.bits, f"0 with format {self.format}: it is gguf's, exl2's, exl3's and mlx's"
            )
        self._check_mlx()
        if self.target and self.format not in HEAD_FORMATS:
            raise SettingsError("target", self.target, f"unset with format {self.format}: it is draft heads'")
        if self.format == "exl2" and not self.bits:
            raise SettingsError("bits", self.bits, "an average such as 4.5 with format exl2")
        if self.format == "exl3" and self.bits not in EXL3_BITS:
            raise SettingsError("bits", self.bits, f"{', '.join(map(str, EXL3_BITS))} with format exl3")
        if sum((self.type != "auto", bool(self.bits), bool(self.size))) > 1:
            raise SettingsError("type", self.type, "one of type, bits and size alone")

    def _check_mlx(self) -> None:
        """Refuse what MLX has no kernel for."""
        if self.format != "mlx":
            if self.group_size:
                raise SettingsError(
                    "group_size", self.group_size, f"0 with format {self.format}: it is mlx's"
                )
            return
        allowed = {"type": ("auto", *MLX_TYPES), "bits": (0, *MLX_BITS), "group_size": (0, *MLX_GROUPS)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise SettingsError(
                    name, getattr(self, name), f"{', '.join(map(str, values))} with format mlx"
                )
        if self.group_size and self.type != "auto":
            raise SettingsError(
                "group_size", self.group_size, f"unset with type {self.type}, which has its own"
            )


def output_defaults(given: dict[str, Any], out: str | Path, dense: Callable[[], bool]) -> dict[str, Any]:
    """The given options with what the output implies: a file ``NAME.gguf``, or an option of gguf alone, is
    format gguf; a dense model in it gets type Q4_K_M where no type, bits or size is given.

    Args:
        dense: whether the model is stored dense; asked only where it matters.

    Raises:
        SettingsError: a format other than gguf is given for a file ``NAME.gguf``.
    """
    file = Path(out).suffix == GGUF
    if file and given.get("format", "gguf") != "gguf":
        allowed = f"gguf for a file {Path(out).name}, or a folder as -o"
        raise SettingsError("format", given["format"], allowed)
    if "format" in given or not (file or any(name in given for name in GGUF_OPTIONS)):
        return given
    sized = any(name in given for name in ("type", "bits", "size"))
    kind = {} if sized or not dense() else {"type": USUAL_TYPE}
    return {**given, "format": "gguf", **kind}


def _check_override(text: str) -> None:
    pattern, _, kind = text.rpartition("=")
    if not pattern or not kind:
        raise SettingsError("overrides", text, "PATTERN=TYPE, such as attn_v=Q6_K")
    try:
        check(pattern)
    except RegexError as error:
        raise SettingsError("overrides", text, f"a regular expression ({error.message})") from error
