"""The last step of every quantization: the written files are read back, compared with the original, and
checked by the gates (gates.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.data.packing import PackedRows, evaluation_rows, row_length
from attar.data.seen import held_out_note
from attar.formats.readers import Decoded, as_stored
from attar.models.fake_quant import CACHES, cache_argument
from attar.models.loading.device import pick_device
from attar.models.loading.load import load_model, load_tokenizer, round_activations
from attar.progress import SILENT, Progress
from attar.quantization.gates import check_layers, check_model, raise_on_error, stuck, suspect
from attar.quantization.plan import QuantizationPlan
from attar.quantization.settings import QuantizeSettings
from attar.sensitivity.compare import Comparison, compare

LENGTH = 256  # tokens in a row of the comparison
PROMPT = 32  # tokens of the prompt of the greedy sample
SAMPLED = 24  # tokens of the greedy sample
SMALL = 2**30  # bytes of the largest dense model that is loaded whole for a sample


def check_result(
    original: Checkpoint,
    written: Checkpoint,
    chosen: QuantizationPlan,
    reports: Sequence[Mapping[str, Any]],
    settings: QuantizeSettings,
    work: Path,
    texts: Sequence[dict[str, Any]] = (),
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Check the layers, then the whole model on held-out text. Returns for the card: ``kl``, ``top1`` and
    ``tokens`` of the comparison, ``held_out``, ``sample``, and ``warnings``.

    Args:
        original: of a quantized source the view that decodes it; it is measured as it is stored, its
            activations rounded.
        texts: records of the text that the model has read (attar.data.seen).

    Raises:
        NumericsError: a gate failed; names the layer and the mend.
    """
    violations = check_layers(reports, method=settings.method)
    raise_on_error(violations)
    results: dict[str, Any] = {"warnings": [str(violation) for violation in violations]}
    if not settings.check_tokens:
        return results
    tokenizer = load_tokenizer(original)
    text = _held_out(tokenizer, original, settings)
    batches = list(text.rows.split(settings.calibration.batch_size))
    note = held_out_note(tokenizer, batches, text.shared, texts)
    results["held_out"] = not note
    results["warnings"] += [f"the KL is not of held-out text: {note}"] if note else []
    device = pick_device(settings.device)
    compared = compare(
        original,
        Decoded(written),
        batches,
        work=work / "compare",
        device=device,
        prepare=partial(round_activations, written),
        prepare_original=partial(round_activations, as_stored(original)),
        progress=progress,
    )
    samples = _samples(original, written, batches[0][:1, :PROMPT], device, progress)
    if compared.kl is not None and compared.blind is not None:
        output = check_model(
            compared.kl,
            compared.blind,
            top1=compared.top1,
            sample=samples.get("sample", ()),
            original_sample=samples.get("original", ()),
            worst_layer=worst_layer(compared, chosen, reports),
        )
        raise_on_error(output)
        results["warnings"] += [str(violation) for violation in output]
    results.update({key: value for key, value in asdict(compared).items() if key != "drift"})
    return results | ({"sample": samples["text"]} if "text" in samples else {})


def worst_layer(compared: Comparison, chosen: QuantizationPlan, reports: Sequence[Mapping[str, Any]]) -> str:
    """The layer that most likely caused the error: in the block where the drift jumps, the worst report."""
    blocks = sorted({_block(site.module) for site in chosen.sites.values()}, key=_number)
    inside = [
        report
        for report in reports
        if compared.worst < len(blocks) and _block(str(report["name"])) == blocks[compared.worst]
    ]
    return suspect(inside) or (blocks[compared.worst] if compared.worst < len(blocks) else "")


def _block(module: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj``."""
    parts = module.split(".")
    last = max((number for number, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


def _number(block: str) -> int:
    tail = block.rpartition(".")[2]
    return int(tail) if tail.isdigit() else 0


def _held_out(tokenizer: Any, original: Checkpoint, settings: QuantizeSettings) -> PackedRows:
    return evaluation_rows(
        tokenizer,
        settings.data,
        tokens=settings.check_tokens,
        sequence_length=row_length(min(LENGTH, settings.calibration.sequence_length), original.config),
        seed=settings.seed,
        bos=settings.bos,
    )


def _samples(
    original: Checkpoint, written: Checkpoint, prompt: Tensor, device: str, progress: Progress
) -> dict[str, Any]:
    """Greedy continuations of a held-out text, if the model is small enough to be loaded whole; the
    original's only if the result repeats a token."""
    if original.nbytes > SMALL or not any("CausalLM" in a for a in original.config["architectures"]):
        return {}
    with progress.task("sample", total=1) as task:
        sample = _continue(load_model(written, dtype=torch.float32, device=device), prompt)
        original_sample = []
        if stuck(sample):  # an error only if the original does not repeat it too
            original_sample = _continue(load_model(original, dtype=torch.float32, device=device), prompt)
        task.advance()
    return {"sample": sample, "original": original_sample, "text": load_tokenizer(original).decode(sample)}


def _continue(model: Any, batch: Tensor) -> list[int]:
    """Greedy tokens after a prompt (1, S), with a KV cache."""
    tokens, cache, generated = batch.to(next(model.parameters()).device), None, []
    name = cache_argument(model) or CACHES[0]
    with torch.no_grad():
        for _ in range(SAMPLED):
            output = model(input_ids=tokens, use_cache=True, **{name: cache})
            tokens, cache = output.logits[:, -1].argmax(-1, keepdim=True), output[name]
            generated.append(int(tokens))
    return generated
