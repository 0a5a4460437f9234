"""Encoders (BERT, RoBERTa, ...): batches of texts to embeddings, or pairs of texts to scores.

    embed    hidden states of a text → mean, or the first token's → float32 (H,)
    score    a pair of texts, and a classifier of one label → sigmoid of its logit

What a folder of sentence-transformers says of pooling and length is read; without it: mean, and the model's
own positions. Texts of a batch are padded to the longest, which the attention mask hides.

Letters: N texts, S tokens of the longest, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attar.checkpoint import Checkpoint
from attar.checkpoint.jsonfile import read_json
from attar.errors import ModelError, SettingsError

POOLINGS = ("mean", "cls")
CLASSIFIER = "ForSequenceClassification"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OFFSET = ("roberta", "xlm-roberta", "camembert")  # positions begin behind the padding token's
_BATCH_TOKENS = 4096


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is of an encoder or a classifier, and not of a causal language model."""
    names = [str(name) for name in config.get("architectures") or []]
    kinds = ("Model", "ForMaskedLM", CLASSIFIER)
    return any(name.endswith(kinds) and not name.endswith(_CAUSAL) for name in names)


class Encoder:
    """One encoder; used from one thread.

    Args:
        model: a folder, a hub id, or an open checkpoint.
        pooling: mean, cls (the first token), or auto: what the folder says.
        device: of torch.

    Attributes:
        context: most tokens of a text, its special tokens included.
        scores: it is a classifier of one label, which scores pairs.

    Raises:
        SettingsError: there is no such pooling.
        ModelError: a classifier of several labels, or a model without hidden states.
    """

    def __init__(self, model: str | Path | Checkpoint, *, pooling: str = "auto", device: str = "cpu") -> None:
        from attar.models.loading.fit import admit  # takes transformers with it
        from attar.models.loading.load import load_model, load_tokenizer

        checkpoint = admit(model, text=True)
        config = checkpoint.config
        self.name, self.scores = checkpoint.name, _is_classifier(config)
        labels = _labels(config)
        if self.scores and labels != 1:
            hint = "a reranker has one; attar evaluate measures classifiers"
            raise ModelError(f"{self.name} is a classifier of {labels} labels", hint=hint)
        self.pooling = _pooling(checkpoint.path) if pooling == "auto" else pooling
        if self.pooling not in POOLINGS:
            raise SettingsError("pooling", self.pooling, f"one of {', '.join(POOLINGS)} for an encoder")
        self.model = load_model(checkpoint, dtype=torch.float32, device=device)
        self.tokenizer = load_tokenizer(checkpoint)
        self.context = _context(checkpoint.path, config)
        self.vocabulary = int(config["vocab_size"])
        self.dimensions = int(self.model.config.hidden_size)

    def embed(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The embedding float32 (H,) of each row of token ids, in their order; not normalized."""
        body = getattr(self.model, self.model.base_model_prefix, self.model)
        return self._batched(rows, None, lambda batch: _pool(body(**batch), batch, self.pooling))

    def score(
        self, rows: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """A score in (0, 1) of each pair, as float32 (1,).

        Args:
            rows: token ids of both texts.
            segments: 1 for tokens of the second text, else 0.
        """
        return self._batched(rows, segments, lambda batch: torch.sigmoid(self.model(**batch).logits))

    def _batched(self, rows: Any, segments: Any, run: Any) -> list[NDArray[np.float32]]:
        """Run rows of similar length together, in batches of _BATCH_TOKENS with their padding."""
        results: list[Any] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        while order:
            count = 1
            while count < len(order) and (count + 1) * len(rows[order[count]]) <= _BATCH_TOKENS:
                count += 1
            indices, order = order[:count], order[count:]
            with torch.inference_mode():
                outputs = run(self._inputs(rows, segments, indices)).float().cpu().numpy()
            for index, output in zip(indices, outputs, strict=True):
                results[index] = output
        return results

    def _inputs(self, rows: Any, segments: Any, indices: Sequence[int]) -> dict[str, Any]:
        width = max(len(rows[index]) for index in indices)
        padding = getattr(self.model.config, "pad_token_id", None) or 0
        ids = torch.full((len(indices), width), padding)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for line, index in enumerate(indices):
            ids[line, : len(rows[index])] = torch.tensor(rows[index])
            mask[line, : len(rows[index])] = 1
            if segments is not None:
                types[line, : len(rows[index])] = torch.tensor(segments[index])
        inputs = {"input_ids": ids, "attention_mask": mask}
        if getattr(self.model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = types
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}


def _pool(output: Any, batch: Mapping[str, Any], pooling: str) -> torch.Tensor:
    """(N, H) of hidden states (N, S, H)."""
    states: torch.Tensor = output.last_hidden_state
    if pooling == "cls":
        return states[:, 0]
    weights = batch["attention_mask"].to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1)


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or [])


def _labels(config: Mapping[str, Any]) -> int:
    return len(config.get("id2label") or range(int(config.get("num_labels") or 2)))


def _pooling(folder: Path) -> str:
    """What sentence-transformers' file says; without it: mean.

    Raises:
        ModelError: it says something that attar does not do.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    stored = read_json(file)
    modes = [name for name, value in stored.items() if name.startswith("pooling_mode") and value is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(modes) != 1 or modes[0] not in known:
        raise ModelError(f"{file}: pools by {' and '.join(modes) or 'nothing'}", hint="--pooling mean or cls")
    return known[modes[0]]


def _context(folder: Path, config: Mapping[str, Any]) -> int:
    """Most tokens of a text."""
    most = int(config.get("max_position_embeddings") or 512)
    if config.get("model_type") in _OFFSET:
        most -= int(config.get("pad_token_id") or 0) + 1
    file = folder / "sentence_bert_config.json"
    stored = read_json(file).get("max_seq_length") if file.is_file() else None
    return min(most, stored) if isinstance(stored, int) and stored > 0 else most
