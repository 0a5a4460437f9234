"""Loss on held-out text: how soups and searches compare merges, and how a merge's quality is measured.

    loss = -1/N sum_i ln p(t_i | t_<i)        nats a token, over the N tokens that are predicted

Encoders are scored on masked tokens, always at the same positions. A model is given as a checkpoint, or as
its tensors in memory with a ``config.json``, so that a search over fifty merges of a small model writes no
file. It runs in float32. Losses are rounded to a millionth of a nat: the last bits of a matrix product depend
on the number of threads, and must not decide between two equal merges. A loss that is not finite counts as
infinite.

Text is packed by one tokenizer once; losses of models with different vocabularies are not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint
from attar.data.packing import pack, row_length
from attar.errors import ModelError
from attar.merging.settings import MergeSettings
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.loading.stored import stored_names
from attar.walks.objectives import masked_token_loss, next_token_loss

DIGITS = 6
LOGIT_BYTES = 256 * 2**20  # of one pass, in float32


@dataclass(frozen=True)
class HeldOutText:
    """Packed text that no model is trained on, to compute losses on.

    Attributes:
        rows: int64 (N, S), S tokens a row; no padding.
        mask_token: id of the tokenizer's mask token; None where it has none.
    """

    rows: Tensor
    mask_token: int | None = None
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        model: str | Path | Checkpoint,
        config: Mapping[str, Any],
        settings: MergeSettings,
        *,
        split: str = "calibration",
        tokens: int | None = None,
    ) -> HeldOutText:
        """Pack the text of the settings' data.

        Args:
            model: its tokenizer is used.
            config: content of a ``config.json``; rows are no longer than its context.
            split: ``calibration`` to choose by; ``evaluation`` is kept for measuring the result.
            tokens: how many; None: ``settings.samples`` rows.

        Raises:
            DataError: the source holds less than one row.
            CheckpointError: the model has no tokenizer.
        """
        tokenizer = load_tokenizer(model)
        length = min(settings.sequence_length, tokens or settings.sequence_length)
        samples = -(-tokens // length) if tokens else settings.samples
        length = row_length(length, dict(config))
        packed = pack(
            tokenizer, settings.data, split, length=length, rows=samples, seed=settings.seed, bos=settings.bos
        )
        return cls(packed.rows, tokenizer.mask_token_id, settings.device)

    def loss(self, model: str | Path | Checkpoint) -> float:
        """Loss of a checkpoint. Raises as :func:`attar.models.loading.load.load_model`."""
        return self.score(load_model(model, dtype=torch.float32, device=self.device))

    def loss_of(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> float:
        """Loss of a model in memory. Nothing is written; the tensors are not changed.

        Args:
            config: content of its ``config.json``.
            state: its tensors by their stored names, of any float types.

        Raises:
            CheckpointError: a parameter has no tensor.
            ModelError: a tensor has another shape than the config asks for.
        """
        return self.score(fill(empty_model(config), state, pick_device(self.device)))

    def score(self, model: Any) -> float:
        """Loss of a loaded model in evaluation mode and on the device."""
        masked = type(model).__name__.endswith("ForMaskedLM")
        if (
            model.get_output_embeddings() is None
            or model.config.is_encoder_decoder
            or (masked and self.mask_token is None)
        ):
            raise ModelError(
                f"{type(model).__name__} with this tokenizer has no loss on plain text",
                hint="a search or a greedy soup needs a causal or masked language model",
            )
        total, count = 0.0, 0
        for number, batch in enumerate(self.batches(model)):
            with torch.inference_mode():
                if masked and self.mask_token is not None:
                    loss = masked_token_loss(model, batch, self.mask_token, seed=number)
                else:
                    loss = next_token_loss(model(input_ids=batch, use_cache=False).logits, batch)
            total += float(loss) * len(batch)
            count += len(batch)
        return round(total / count, DIGITS) if math.isfinite(total) else math.inf

    def batches(self, model: Any) -> Sequence[Tensor]:
        """The rows on the device, in batches whose logits fit in :data:`LOGIT_BYTES`."""
        vocabulary = model.get_input_embeddings().weight.shape[0]
        size = max(1, LOGIT_BYTES // (self.rows.shape[1] * vocabulary * 4))
        return list(self.rows.to(model.device).split(min(size, 8)))


def fill(model: nn.Module, state: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Give an empty model (:func:`attar.models.loading.empty.empty_model`) its weights, in float32.

    The model is changed and returned; the tensors are not changed.

    Raises:
        CheckpointError: a parameter has no tensor.
        ModelError: one has another shape.
    """
    for name, stored in stored_names(model, SimpleNamespace(tensors=state, path="merge")).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        wanted, value = getattr(owner, leaf).shape, state[stored]
        if value.shape != wanted:
            raise ModelError(f"{stored} is {list(value.shape)}, but the config asks for {list(wanted)}")
        setattr(owner, leaf, nn.Parameter(value.to(device, torch.float32), requires_grad=False))
    tie: Any = model
    tie.tie_weights()
    for _, buffer in model.named_buffers():
        buffer.data = buffer.data.to(device)
    return model.eval()
