"""The verb ``extract``: the difference of two models, written as a LoRA adapter.

    W - W0 = B A        each Linear weight that differs, by its leading singular vectors     (low_rank.py)

Scale is shared between both factors, sqrt(S) each, and lora_alpha = r, so that peft adds B A as it is. What
is no Linear weight and differs (embeddings, head, norms) goes whole into the adapter as peft's
``modules_to_save``, biases as its ``bias: all``; or is left out and listed, with how much it differs. Where
the embedding is tied to the head and differs, both are saved, so that peft gives both the new one.

Each tensor is done in one thread: the last bits of a decomposition depend on the number of threads.

Source: mergekit's extract-lora does the same. Differs from it: rank by energy; no full decomposition of large
matrices unless asked for; biases and norms are saved too; what is left out is said.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint import atomic
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import SINGLE, check_finite, open_checkpoint
from attar.checkpoint.output import StageOutput, produce
from attar.checkpoint.shards import ShardWriter, TensorSpec, tensor_spec, write_checkpoint_tensors
from attar.checkpoint.tensors import stored_dtype
from attar.errors import ModelError
from attar.formats.readers import Decoded, quant_method
from attar.kernels.threads import one_thread
from attar.merging.adapters.differences import Pair, Part, pair, saved_modules
from attar.merging.adapters.files import CONFIG, WEIGHTS
from attar.merging.adapters.low_rank import low_rank
from attar.merging.extraction_settings import VERSION, ExtractSettings
from attar.progress import SILENT, Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

_PREFIX = "base_model.model."
_ONE_FILE = 2**62
Row = dict[str, Any]


def extract(
    model: str | Path | Checkpoint,
    base: str | Path | Checkpoint,
    out: Path,
    settings: ExtractSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Path:
    """Write an adapter that takes ``base`` to ``model``, as far as its rank allows.

    The card's details ``extraction`` tell for every Linear its rank, the energy held, the error relative to
    the update and to the weight; what was saved whole; and what differs and is not covered.

    Args:
        model: the fine-tuned model, dense or packed.
        base: the model that it came from, of the same shapes.
        out: the folder to make: peft's ``adapter_config.json`` and ``adapter_model.safetensors``, tokenizer,
            licence texts and card.
        settings: ranks, and what becomes of the rest.
        key: identity of this work, when a recipe knows it.

    Returns:
        ``out``.

    Raises:
        ModelError: the models do not have the same tensors and shapes, or no Linear weight differs.
        NumericsError: a weight is NaN or infinite.
        OutputError: ``out`` exists or cannot be written.
    """
    tuned, start = open_checkpoint(model), open_checkpoint(base)
    found = pair(_dense(tuned), _dense(start))
    with produce(out, "extract", settings, VERSION, [tuned, start], force=force, key=key) as output:
        output.command = output.command.replace(" --model ", " --base ", 1)
        rows = _compute(found, settings, output.work, progress)
        _write(found, rows, settings, output, start)
        copy_companions(tuned.path, output.folder)
        output.details["extraction"] = _details(rows, settings)
    return Path(out)


def _dense(checkpoint: Checkpoint) -> Any:
    return checkpoint if quant_method(checkpoint) is None else Decoded(checkpoint)


def _compute(found: Pair, settings: ExtractSettings, work: Path, progress: Progress) -> list[Row]:
    """One row for each part; factors and rows are kept in the work folder, where a later run finds them."""
    rows = []
    with progress.task("extract", total=len(found.parts)) as task:
        for number, part in enumerate(found.parts):
            folder = work / f"{number:05d}"
            told = folder / "row.json"
            if not told.is_file():
                shutil.rmtree(folder, ignore_errors=True)  # factors without their row: killed in between
                folder.mkdir()
                row, factors = _part(found, part, settings)
                if factors:
                    write_checkpoint_tensors(folder, factors)
                atomic.write_json(told, row)
            rows.append(read_json(told))
            task.advance()
    return rows


def _part(found: Pair, part: Part, settings: ExtractSettings) -> tuple[Row, dict[str, Tensor]]:
    """What differs in one tensor, and its factors where it is a Linear's weight."""
    new, old = found.tuned.load(part.tuned), found.base.load(part.base)
    check_finite(part.tuned, new, found.tuned.path)
    check_finite(part.base, old, found.base.path)
    row: Row = {"name": part.base, "module": part.module, "kind": part.kind}
    if not new.is_floating_point() or not old.is_floating_point():
        return {**row, "changed": not torch.equal(new, old)}, {}
    D = new.to(torch.float32, copy=True).sub_(old.float())
    with one_thread():
        size, scale = float(D.double().norm()), float(old.double().norm())
    row |= {"changed": size > 0, "change": size / scale if scale else None}
    if part.kind != "linear" or not size:
        return row, {}
    D = D.T.contiguous() if found.transposed else D
    with one_thread():
        made = low_rank(
            D, settings.rank, settings.energy, _generator(settings.seed, part.base), settings.exact
        )
    dtype = getattr(torch, settings.dtype)
    A, B = made.A.to(dtype).contiguous(), made.B.to(dtype).contiguous()
    row |= {"rank": made.rank, "energy": made.energy, "error": made.error}
    row["weight_error"] = made.error * size / scale if scale else None
    stem = f"{_PREFIX}{part.module}."
    return row, {f"{stem}lora_A.weight": A, f"{stem}lora_B.weight": B}


def _generator(seed: int, name: str) -> torch.Generator:
    """Random numbers of one tensor, whatever is done before it."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _write(
    found: Pair, rows: list[Row], settings: ExtractSettings, output: StageOutput, base: Checkpoint
) -> None:
    """Config and weights of the adapter."""
    low = {row["module"]: row["rank"] for row in rows if "rank" in row}
    if not low:
        raise ModelError(
            f"{found.tuned.name} and {found.base.name} differ in no weight of a Linear; there is nothing to "
            "extract"
        )
    whole = [part for part, row in zip(found.parts, rows, strict=True) if row["changed"] and part.saved]
    if settings.others == "leave":
        whole = []
    modules = saved_modules(found, [part for part in whole if part.kind == "whole"])
    biases = [part for part in whole if part.kind == "bias"]
    for part, row in zip(found.parts, rows, strict=True):
        row["saved"] = part in biases or (part.kind == "whole" and part.module in modules)
    _write_weights(found, modules, biases, low, settings, output)
    atomic.write_json(output.folder / CONFIG, _config(found, low, sorted(modules), bool(biases), base))


def _write_weights(
    found: Pair,
    modules: Mapping[str, Mapping[str, str]],
    biases: list[Part],
    low: Mapping[str, int],
    settings: ExtractSettings,
    output: StageOutput,
) -> None:
    """``adapter_model.safetensors``: the factors from the work folder, the rest from the model."""
    dtype = getattr(torch, settings.dtype)
    files = sorted(path for path in output.work.glob(f"*/{SINGLE}"))
    sources = {
        f"{_PREFIX}{module}.{leaf}": name
        for module, leaves in modules.items()
        for leaf, name in leaves.items()
    }
    for part in biases:
        wrapped = ".base_layer" if part.module in low else ""
        sources[f"{_PREFIX}{part.module}{wrapped}.bias"] = part.tuned
    slots = [
        TensorSpec(name, stored_dtype(dtype), tuple(found.tuned.tensors[of].shape))
        for name, of in sources.items()
    ]
    for file in files:
        slots += [tensor_spec(name, tensor) for name, tensor in _load(file).items()]
    writer = ShardWriter(output.folder, slots, max_shard_bytes=_ONE_FILE)
    for name, of in sources.items():
        writer.add(name, found.tuned.load(of).to(dtype))
    for file in files:
        for name, tensor in _load(file).items():
            writer.add(name, tensor)
    (written,) = writer.finish()
    written.rename(output.folder / WEIGHTS)


def _load(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, Tensor] = load_file(file)
    return dict(sorted(loaded.items()))


def _config(
    found: Pair, low: Mapping[str, int], saved: list[str], biases: bool, base: Checkpoint
) -> dict[str, Any]:
    """peft's ``adapter_config.json``."""
    r = Counter(low.values()).most_common(1)[0][0]
    others = {module: rank for module, rank in low.items() if rank != r}
    local = base.name == base.path.name
    architecture = next(iter(found.base.config.get("architectures") or [""]))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if architecture.endswith(("ForCausalLM", "LMHeadModel")) else None,
        "base_model_name_or_path": str(base.source) if local else base.name,
        "r": r,
        "lora_alpha": r,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(low),
        "modules_to_save": saved or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": found.transposed,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _details(rows: list[Row], settings: ExtractSettings) -> dict[str, Any]:
    """What the card tells."""
    changed = [row for row in rows if row["changed"]]
    told = ("module", "rank", "energy", "error", "change", "weight_error")
    return {
        "linear": [{name: row[name] for name in told} for row in changed if "rank" in row],
        "saved": [row["name"] for row in changed if row["saved"]],
        "not_covered": [
            {"name": row["name"], "change": row.get("change")}
            for row in changed
            if "rank" not in row and not row["saved"]
        ],
        "unchanged": len(rows) - len(changed),
        "others": settings.others,
    }
