"""The verb ``extract``: the difference of two models, written as a LoRA adapter.

    W - W0 = B A        each Linear weight that differs, by its leading singular vectors     (low_rank.py)

Both factors get the same scale, sqrt(S) each, and lora_alpha = r, so that peft adds B A. Other tensors that
differ (embeddings, head, norms) are saved whole in the adapter as peft's ``modules_to_save``, biases as its
``bias: all``; or they are left out and listed, with how much they differ. Where the embedding is tied to the
head and differs, both are saved, so that peft replaces both.

Each tensor is computed in one thread: the last bits of a decomposition depend on the number of threads.

Source: mergekit's extract-lora does the same. Differs from it: rank by energy; no full decomposition of large
matrices unless asked for; biases and norms are saved too; tensors that are left out are listed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import atomic
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import SINGLE, Checkpoint, check_finite
from attar.checkpoint.output import StageOutput, produce
from attar.checkpoint.processes import Processes
from attar.checkpoint.shards import ShardWriter, TensorSpec, tensor_spec, write_checkpoint_tensors
from attar.checkpoint.tensors import stored_dtype
from attar.errors import ModelError
from attar.kernels.threads import one_thread
from attar.merging.adapters.differences import ModelPair, TensorPair, pair_models, saved_modules
from attar.merging.adapters.low_rank import low_rank
from attar.merging.adapters.settings import VERSION, ExtractSettings
from attar.models.loading.adapter_files import CONFIG, WEIGHTS
from attar.models.loading.fit import admit
from attar.models.loading.single_experts import decoded_view
from attar.progress import SILENT, Progress

_PREFIX = "base_model.model."
_ONE_FILE = 2**62


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
    """Write an adapter that takes ``base`` to ``model``, as far as its rank allows. Returns ``out``.

    The card's details ``extraction`` give for every Linear its rank, the energy held, the error relative to
    the update and to the weight; which tensors are saved whole; and which differ and are not covered.

    Args:
        base: the model that it was tuned from, of the same shapes.
        out: the new folder: peft's ``adapter_config.json`` and ``adapter_model.safetensors``, tokenizer,
            licence texts and card.
        key: identity of this work, when a recipe knows it.

    Raises:
        ModelError: the models do not have the same tensors and shapes, or no Linear weight differs.
        NumericsError: a weight is NaN or infinite.
        OutputError: ``out`` exists or cannot be written.
    """
    tuned, start = admit(model, progress), admit(base, progress)
    models = pair_models(decoded_view(tuned, exact=True), decoded_view(start, exact=True))
    with produce(out, "extract", settings, VERSION, [tuned, start], force=force, key=key) as output:
        output.command = output.command.replace(" --model ", " --base ", 1)
        rows = _compute(models, settings, output.shared, output.processes, progress)
        output.exit_unless_rank0()
        _write(models, rows, settings, output, start)
        copy_companions(tuned.path, output.folder)
        output.details["extraction"] = _details(rows, settings)
    return Path(out)


def _compute(
    models: ModelPair, settings: ExtractSettings, work: Path, processes: Processes, progress: Progress
) -> list[dict[str, Any]]:
    """One row for each tensor; factors and rows are kept in the work folder for a resumed run. The processes
    share the tensors."""
    files = [work / f"{index:05d}" / "row.json" for index in range(len(models.tensors))]
    owners = processes.partition_by_size([models.base.tensors[pair.base].nbytes for pair in models.tensors])
    assigned = [index for index, owner in enumerate(owners) if owner == processes.rank]
    with progress.task("extract", total=len(assigned)) as task:
        for index in assigned:
            row_file, pair = files[index], models.tensors[index]
            if not row_file.is_file():
                folder = row_file.parent
                shutil.rmtree(folder, ignore_errors=True)  # factors without their row: killed in between
                folder.mkdir()
                row, factors = _factorize(models, pair, settings)
                if factors:
                    write_checkpoint_tensors(folder, factors)
                atomic.write_json(row_file, row)
            task.advance()
    processes.wait()
    return [read_json(file) for file in files]


def _factorize(
    models: ModelPair, pair: TensorPair, settings: ExtractSettings
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """How one tensor differs, and the factors of a Linear's weight."""
    new, old = models.tuned.load(pair.tuned), models.base.load(pair.base)
    check_finite(pair.tuned, new, models.tuned.path)
    check_finite(pair.base, old, models.base.path)
    row: dict[str, Any] = {"name": pair.base, "module": pair.module, "kind": pair.kind}
    if not new.is_floating_point() or not old.is_floating_point():
        return {**row, "changed": not torch.equal(new, old)}, {}
    D = new.to(torch.float32, copy=True).sub_(old.float())
    with one_thread():
        size, scale = float(D.double().norm()), float(old.double().norm())
    row |= {"changed": size > 0, "change": size / scale if scale else None}
    if pair.kind != "linear" or not size:
        return row, {}
    D = D.T.contiguous() if models.transposed else D
    generator = _generator(settings.seed, pair.base)
    with one_thread():
        factors = low_rank(D, settings.rank, settings.energy, generator, settings.exact)
    row |= {"rank": factors.rank, "energy": factors.energy, "error": factors.error}
    row["weight_error"] = factors.error * size / scale if scale else None
    dtype, stem = getattr(torch, settings.dtype), f"{_PREFIX}{pair.module}."
    return row, {
        f"{stem}lora_A.weight": factors.A.to(dtype).contiguous(),
        f"{stem}lora_B.weight": factors.B.to(dtype).contiguous(),
    }


def _generator(seed: int, name: str) -> torch.Generator:
    """The random numbers of one tensor, independent of the order of the tensors."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _write(
    models: ModelPair,
    rows: Sequence[dict[str, Any]],
    settings: ExtractSettings,
    output: StageOutput,
    base: Checkpoint,
) -> None:
    """Config and weights of the adapter; every row gets ``saved``."""
    ranks = {row["module"]: row["rank"] for row in rows if "rank" in row}
    if not ranks:
        raise ModelError(
            f"{models.tuned.name} and {models.base.name} differ in no weight of a Linear;"
            " there is nothing to extract"
        )
    changed = [pair for pair, row in zip(models.tensors, rows, strict=True) if row["changed"]]
    saved = [pair for pair in changed if pair.can_be_saved] if settings.others == "save" else []
    modules = saved_modules(models, [pair for pair in saved if pair.kind == "whole"])
    biases = [pair for pair in saved if pair.kind == "bias"]
    for pair, row in zip(models.tensors, rows, strict=True):
        row["saved"] = pair in biases or (pair.kind == "whole" and pair.module in modules)
    _write_weights(models, modules, biases, ranks, settings, output)
    config = _config(models, ranks, sorted(modules), bool(biases), base)
    atomic.write_json(output.folder / CONFIG, config)


def _write_weights(
    models: ModelPair,
    modules: Mapping[str, Mapping[str, str]],
    biases: Sequence[TensorPair],
    ranks: Mapping[str, int],
    settings: ExtractSettings,
    output: StageOutput,
) -> None:
    """``adapter_model.safetensors``: the factors from the work folder, the rest from the tuned model."""
    dtype = getattr(torch, settings.dtype)
    files = sorted(output.work.glob(f"*/{SINGLE}"))
    sources = {
        f"{_PREFIX}{module}.{leaf}": name
        for module, leaves in modules.items()
        for leaf, name in leaves.items()
    }
    for pair in biases:
        wrapped = ".base_layer" if pair.module in ranks else ""
        sources[f"{_PREFIX}{pair.module}{wrapped}.bias"] = pair.tuned
    specs = [
        TensorSpec(name, stored_dtype(dtype), tuple(models.tuned.tensors[source].shape))
        for name, source in sources.items()
    ]
    for file in files:
        specs += [tensor_spec(name, tensor) for name, tensor in _load(file).items()]
    writer = ShardWriter(output.folder, specs, max_shard_bytes=_ONE_FILE)
    for name, source in sources.items():
        writer.add(name, models.tuned.load(source).to(dtype))
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
    models: ModelPair, ranks: Mapping[str, int], saved: list[str], biases: bool, base: Checkpoint
) -> dict[str, Any]:
    """peft's ``adapter_config.json``."""
    r = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: rank for module, rank in ranks.items() if rank != r}
    local = base.name == base.path.name
    architecture = next(iter(models.base.config.get("architectures") or [""]))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if architecture.endswith(("ForCausalLM", "LMHeadModel")) else None,
        "base_model_name_or_path": str(base.source) if local else base.name,
        "r": r,
        "lora_alpha": r,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "modules_to_save": saved or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": models.transposed,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _details(rows: Sequence[dict[str, Any]], settings: ExtractSettings) -> dict[str, Any]:
    """``extraction`` for the card."""
    changed = [row for row in rows if row["changed"]]
    columns = ("module", "rank", "energy", "error", "change", "weight_error")
    return {
        "linear": [{name: row[name] for name in columns} for row in changed if "rank" in row],
        "saved": [row["name"] for row in changed if row["saved"]],
        "not_covered": [
            {"name": row["name"], "change": row.get("change")}
            for row in changed
            if "rank" not in row and not row["saved"]
        ],
        "unchanged": len(rows) - len(changed),
        "others": settings.others,
    }
