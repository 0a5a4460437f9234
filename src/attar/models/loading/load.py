"""Loading and saving models and tokenizers through transformers, with one-line errors and no warnings.

Only code that transformers ships is run: a checkpoint that brings its own Python files is refused unless
transformers knows the family itself. Nothing here goes to the network; :mod:`attar.checkpoint` fetches.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, TokenizersBackend

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import GENERATION
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint
from attar.errors import CheckpointError
from attar.memory import check_memory
from attar.models.draft_heads.kind import refuse_draft_head
from attar.models.loading.configs import first_line, load_config, model_class, quiet
from attar.models.loading.device import pick_device
from attar.models.loading.experts import unstack
from attar.models.loading.plain_tokenizer import TOKENIZER_FILES
from attar.models.loading.single_experts import is_unstacked, stacked_state
from attar.models.loading.stored import report_misfits, stored_of
from attar.models.loading.tokenizer_file import follow_file
from attar.models.loading.tokenizer_rows import within_rows

logger = logging.getLogger(__name__)
SENTENCEPIECE = ("sentencepiece", "google.protobuf")
LARGER = (
    "a larger machine, or what works block by block: quantize, merge, export, prune to zeros, "
    "evaluate --runner blocks"
)


def load_model(
    model: str | Path | Checkpoint, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Any:
    """Load a model in evaluation mode, of the class that its config names.

    Quantized checkpoints (those of :data:`attar.formats.readers.READERS`) come back dense; where their scheme
    rounds activations or the KV cache, the model does so too, by hooks (:mod:`attar.models.fake_quant`). A
    view that decodes such a checkpoint is the dense model, without.

    Args:
        model: a folder, a ``.gguf`` file, a hub id, ``attar:tiny``, or an open checkpoint.
        dtype: of the weights; None keeps the checkpoint's.
        device: where the weights go; ``auto`` is the GPU where there is one.

    Raises:
        SettingsError: torch cannot use this device here.
        CheckpointError: files are missing or damaged, or tensors do not fit the architecture's shapes.
        ModelError: transformers does not know the architecture, or tensors are missing or left over.
        NumericsError: a weight is NaN or infinite.
        MemoryNeededError: the weights are larger than the memory that is free.
    """
    where = pick_device(str(device))
    checkpoint = _opened(model)
    _check_room(checkpoint, dtype)
    config = load_config(checkpoint.path, checkpoint.config)
    kind = model_class(config)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint.path), "use_safetensors": True}
    from attar.formats import readers

    decoded = isinstance(checkpoint, readers.Decoded) or readers.quant_method(checkpoint) is not None
    if decoded or is_unstacked(checkpoint) or checkpoint.mtp or not checkpoint.as_stored:
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        source = {"pretrained_model_name_or_path": None, "state_dict": stacked_state(checkpoint)}
    with quiet():
        try:
            loaded, report = kind.from_pretrained(
                **source,
                config=config,
                dtype=dtype or "auto",
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                output_loading_info=True,
            )
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint.path}: transformers cannot load it: {first_line(error)}"
            ) from error
        if source["pretrained_model_name_or_path"] is None and (checkpoint.path / GENERATION).is_file():
            content = read_json(checkpoint.path / GENERATION)
            try:
                loaded.generation_config = GenerationConfig.from_dict(content)
            except Exception as error:
                raise CheckpointError(f"{checkpoint.path / GENERATION}: {first_line(error)}") from error
    _check_report(checkpoint, loaded, report)
    _check_numbers(checkpoint, loaded)
    round_activations(checkpoint, loaded)
    return loaded.eval().to(where)


def _check_room(checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
    """Raise MemoryNeededError where the dense weights do not fit into memory (of the CPU, where they are
    read on their way to a GPU too)."""
    from attar.checkpoint.parts import count

    parameters = count(checkpoint).parameters
    size = parameters * dtype.itemsize if dtype is not None else max(checkpoint.nbytes, 2 * parameters)
    check_memory(checkpoint.name, size, hint=LARGER)


def round_activations(checkpoint: Checkpoint, model: Any) -> None:
    """Attach the rounding of activations and of the KV cache of a checkpoint's scheme."""
    from attar.formats import compressed_tensors, fp8, modelopt
    from attar.formats.modelopt_conversion import KV_MODULES, ToCompressedTensors
    from attar.formats.readers import quant_method

    quantization = checkpoint.config.get("quantization_config")
    scale_modules = dict.fromkeys(KV_MODULES, "")  # path from attention to the scales of keys and values
    method = quant_method(checkpoint)
    if method in (fp8.METHOD, fp8.FBGEMM):
        quantization = fp8.compressed_scheme(checkpoint)
    elif method == modelopt.METHOD:
        quantization = ToCompressedTensors(checkpoint).config["quantization_config"]
        scale_modules = {leaf: f"{name}." for leaf, name in KV_MODULES.items()}
    elif method != compressed_tensors.METHOD:
        return
    assert quantization is not None
    scheme = compressed_tensors.CompressedTensorsConfig(quantization)
    if not (scheme.kv_cache or any(group.activations for group in scheme.groups)):
        return
    from attar.models.anatomy.discover import discover
    from attar.models.anatomy.roles import is_linear
    from attar.models.fake_quant import round_cache, round_inputs

    if any(group.activations for group in scheme.groups):
        unstack(model)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    leaves, asymmetric = fp8.INPUT_SCALES, compressed_tensors.INPUT_ZERO
    above = compressed_tensors.INPUT_GLOBAL
    parts = [f"{name}.{leaf}" for name in linears for leaf in (*leaves, asymmetric, above)]
    stored = stored_of(model, parts, checkpoint)
    for name, module in linears.items():
        group = scheme.group(name, "Linear")
        if group and group.activations:
            leaf_names = (above,) if f"{name}.{above}" in stored else leaves
            known = next((path for leaf in leaf_names if (path := stored.get(f"{name}.{leaf}"))), None)
            zero, scale = _loaded(checkpoint, stored.get(f"{name}.{asymmetric}")), _loaded(checkpoint, known)
            divides = group.activations.strategy == "tensor_group"
            if divides and leaf_names is leaves and scale is not None:  # ModelOpt's multiplies
                scale = 1.0 / scale.float()
            missing = f"{name}.{above if divides else compressed_tensors.INPUT_SCALE}"
            scale = _needed(checkpoint, missing, group.activations, scale)
            round_inputs(module, group.activations, scale, zero)
    rule = scheme.kv_cache
    for block in discover(model).blocks if rule else ():
        assert rule is not None
        name = block.attention.name
        scales = [
            _needed(checkpoint, path, rule, _stored_tensor(checkpoint, model, path))
            for leaf in (compressed_tensors.K_SCALE, compressed_tensors.V_SCALE)
            for path in [f"{name}.{scale_modules[leaf]}{leaf}"]
        ]
        round_cache(model.get_submodule(name), rule, *scales)


def _needed(checkpoint: Checkpoint, name: str, rule: Any, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The scale of a static rule, which must be there; None where the scale is dynamic."""
    if not rule.static:
        return None
    if scale is None:
        raise CheckpointError(
            f"{checkpoint.path}: {name} is missing", hint="the packed checkpoint is incomplete"
        )
    return scale


def _loaded(checkpoint: Checkpoint, name: str | None) -> torch.Tensor | None:
    return None if name is None else checkpoint.load(name)


def _stored_tensor(checkpoint: Checkpoint, model: Any, name: str) -> torch.Tensor | None:
    """A stored tensor that is not a parameter, with or without the model's prefix; None where there is
    none."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        if candidate in checkpoint.tensors:
            return checkpoint.load(candidate)
    return None


def load_tokenizer(model: str | Path | Checkpoint) -> Any:
    """Load the tokenizer of a model. Where it has added tokens that the model has no row for, it is a
    :class:`attar.models.loading.tokenizer_rows.TokenizerWithinRows`.

    Raises:
        CheckpointError: there is none, it cannot be read, or its vocabulary is larger than the model's.
    """
    checkpoint = _opened(model)
    rows = _vocabulary_rows(checkpoint.config)
    tokenizer = read_tokenizer(checkpoint.path)
    return tokenizer if rows is None else within_rows(tokenizer, rows, checkpoint.path)


def read_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a folder, without a check against its model.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{path}: no tokenizer", hint="copy tokenizer.json and tokenizer_config.json there"
        )
    with quiet():
        try:
            loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            differs = type(loaded) is not TokenizersBackend and follow_file(loaded, path)
        except Exception as error:
            generic = _by_file(path, error)
            if generic is None:
                raise _unreadable(path, first_line(error)) from error
            return generic
    if differs and path.suffix != ".gguf":  # the folder in the cache of a GGUF file, which nobody else reads
        _warn_other_tokens(str(path / "tokenizer.json"), type(loaded).__name__)
    return loaded


def _by_file(path: Path, error: Exception) -> Any:
    """The tokenizer of tokenizer.json by transformers' generic class, where the class that the folder names
    cannot be built from it; None where there is none, or the class is the folder's own code."""
    if "trust_remote_code" in str(error) or not (path / "tokenizer.json").is_file():
        return None
    try:
        return TokenizersBackend.from_pretrained(str(path), local_files_only=True)
    except Exception:  # the first error names the fault
        return None


@functools.cache
def _warn_other_tokens(file: str, kind: str) -> None:
    """Once per process and file."""
    logger.warning("%s makes other tokens than transformers' %s, which builds its own splitting", file, kind)


def _unreadable(path: Path, reason: str) -> CheckpointError:
    """The error for a tokenizer that transformers cannot load, with its real cause."""
    pieces = [name for name in ("tokenizer.model", "spiece.model") if (path / name).is_file()]
    alone = pieces and not (path / "tokenizer.json").is_file()
    if alone and not all(map(_installed, SENTENCEPIECE)):
        return CheckpointError(
            f"{path}: {pieces[0]} without tokenizer.json needs the packages sentencepiece and protobuf",
            hint="pip install sentencepiece protobuf; or copy a tokenizer.json there",
        )
    if "custom code" in reason or "trust_remote_code" in reason:
        reason = "its class is Python code of the folder's own, which attar does not run"
    return CheckpointError(f"{path}: the tokenizer cannot be loaded: {reason}")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def save_model(model: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json, generation_config.json and safetensors that ``from_pretrained`` loads.

    Args:
        model: a transformers model with real weights; not changed.
        dtype: floating-point weights are written in it; None keeps theirs. Tied weights are written once.

    Raises:
        OSError: the disk is full or read-only (:mod:`attar.checkpoint.output` makes it one line).
    """
    folder.mkdir(parents=True, exist_ok=True)
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}  # tied weights stay one tensor, to be written once
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
        state[name] = tensor
    before = (model.config.dtype, model.config.architectures)
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=state)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # a full disk is a text here, not an OSError
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
    finally:
        model.config.dtype, model.config.architectures = before
    if dtype is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_config(path, config)


def _opened(model: str | Path | Checkpoint) -> Checkpoint:
    from attar.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(getattr(model, "stacked", model))  # of a view with single experts, too
    refuse_draft_head(checkpoint)
    return checkpoint


def _check_report(checkpoint: Checkpoint, model: Any, report: Any) -> None:
    """Raise where the checkpoint's tensors and the architecture's differ."""
    fields = dict(report) if isinstance(report, Mapping) else vars(report)
    report_misfits(
        f"{checkpoint.path} ({type(model).__name__})",
        model,
        wrong={name: shapes for name, *shapes in sorted(fields.get("mismatched_keys") or [])},
        missing=sorted(fields.get("missing_keys") or []),
        extra=sorted(fields.get("unexpected_keys") or []),
    )


def _check_numbers(checkpoint: Checkpoint, model: Any) -> None:
    """Raise where a weight is NaN or infinite."""
    from attar.checkpoint.open import check_finite

    for name, tensor in model.named_parameters():
        info = checkpoint.tensors.get(name)
        check_finite(name, tensor, info.file if info is not None else checkpoint.path)


def _vocabulary_rows(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    rows = config.get("vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None)
    return rows if isinstance(rows, int) else None
