"""A model with a LoRA adapter added, readable like a checkpoint.

Hu et al. 2021, "LoRA", arXiv 2106.09685, equation 3; Kalajdzievski 2023, "rsLoRA", arXiv 2312.03732;
Liu et al. 2024, "DoRA", arXiv 2402.09353, equation 5. Files as peft writes them.

    W' = W + s B A                          s = alpha / r, with rsLoRA alpha / sqrt(r)
    W' = m (W + s B A) / |W + s B A|        DoRA; the norm over each output's inputs

    W (N, K) weight; A (r, K), B (N, r); m (N,) magnitudes. An embedding's A is (r, V), B (d, r), and
    (s B A)^T is added; likewise for weights that are stored (K, N), such as GPT-2's.

Computed in float32 and rounded once, to the stored type of the weight. In float32 the bits equal the bits of
peft's ``merge_and_unload``.

Differs from peft: where head and embedding are tied and the adapter updates only one of them, or each
differently, the result has a separate head, and computes the same as model and adapter; peft changes the
shared tensor for both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.companions import copy_companions, tokenizer_files
from attar.checkpoint.parts import part_of
from attar.checkpoint.tensors import TORCH, read_tensor
from attar.formats.readers import DecodedInfo
from attar.kernels.threads import one_thread
from attar.merging.tokenizer.chat_template import read_chat_template, write_chat_template
from attar.models.loading.adapter_files import HEAD, find_updates, read_adapter_config


def tokenizer_folder(view: Any) -> Path:
    """The folder of a checkpoint's tokenizer, or of a view's of one."""
    folder: Path = getattr(view, "tokenizer_folder", view.path)
    return folder


class AdaptedCheckpoint:
    """A view of a checkpoint with an adapter added to each weight as it is loaded.

    Args:
        checkpoint: the model: a checkpoint, or a view of one with its weights decoded.
        folder: the adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Attributes:
        name: ``model+adapter``.
        config: the model's; with ``tie_word_embeddings`` false where the adapter unties head and embedding.
        tokenizer_folder: the adapter's, where it has a tokenizer that fits the rows; else the model's.
        notes: about them, for the user.

    Raises:
        CheckpointError: a file of the adapter is missing or damaged.
        ModelError: the adapter is not LoRA, or something in it belongs to no tensor of the model; names it.
    """

    def __init__(self, checkpoint: Any, folder: Path) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.path, self.name = checkpoint.path, f"{checkpoint.name}+{folder.name}"
        self.config: dict[str, Any] = dict(checkpoint.config)
        self.updates = find_updates(checkpoint, folder, read_adapter_config(folder))
        if HEAD in self.updates and HEAD not in checkpoint.tensors:
            self.config["tie_word_embeddings"] = False
        self.tensors: dict[str, Any] = dict(checkpoint.tensors)
        for name, update in self.updates.items():
            info = checkpoint.tensors[update.source]
            shape = tuple(update.replacement.shape if update.replacement else info.shape)
            self.tensors[name] = DecodedInfo(name, info.dtype, shape, update.source, info.file)
            if update.replacement is not None and part_of(name) == "embedding":
                self._resize(info.shape[0], shape[0])

        self.tokenizer_folder, self.notes = self._tokenizer()

    def _tokenizer(self) -> tuple[Path, tuple[str, ...]]:
        if not (self.folder / "tokenizer_config.json").is_file() or not tokenizer_files(self.folder):
            return tokenizer_folder(self.checkpoint), ()
        from attar.merging.tokenizer.tokenizer import read_tokenizer

        rows, last = self.config.get("vocab_size"), max(read_tokenizer(self.folder).ids.values(), default=-1)
        if isinstance(rows, int) and last >= rows:
            note = f"{self.folder.name} has a tokenizer of {last + 1:,} tokens, and the model {rows:,} rows"
            return tokenizer_folder(self.checkpoint), (
                note + "the model keeps its own, and its chat template",
            )
        return self.folder, (f"the tokenizer comes from {self.folder.name}",)

    def _resize(self, old: int, rows: int) -> None:
        """Set the vocabulary's size for an embedding that is replaced by one with more rows."""
        if rows != old and self.config.get("vocab_size") == old:
            self.config["vocab_size"] = rows

    def load(self, name: str) -> Tensor:
        """One tensor, the adapter added, in the model's stored type.

        Raises:
            CheckpointError: there is no such tensor.
        """
        update = self.updates.get(name)
        if update is None:
            unchanged: Tensor = self.checkpoint.load(name)
            return unchanged
        replacement = update.replacement
        weight: Tensor = read_tensor(replacement) if replacement else self.checkpoint.load(update.source)
        dtype: torch.dtype = getattr(torch, TORCH[self.checkpoint.tensors[update.source].dtype])
        if update.A is None and update.bias is None:
            return weight.to(dtype)
        A, B, magnitude, bias = (
            None if info is None else read_tensor(info).float()
            for info in (update.A, update.B, update.magnitude, update.bias)
        )
        with one_thread():
            return adapted(
                weight.float(), A, B, magnitude, bias, scale=update.scale, transposed=update.transposed
            ).to(dtype)


def copy_companions_of(view: Any, folder: Path) -> None:
    """Copy a model's companions; of an adapter that has a tokenizer its own, and its chat template.

    Raises:
        CheckpointError: one is a link out of its folder.
        OutputError: no space, or no permission.
    """
    copy_companions(view.path, folder)
    source = tokenizer_folder(view)
    if source == view.path:
        return
    template = read_chat_template(source) or read_chat_template(view.path)
    for name in tokenizer_files(folder):
        (folder / name).unlink()
    copy_companions(source, folder)
    if template is not None:
        write_chat_template(folder, template)


def adapted(
    weight: Tensor,
    A: Tensor | None,
    B: Tensor | None,
    magnitude: Tensor | None,
    bias: Tensor | None,
    *,
    scale: float,
    transposed: bool,
) -> Tensor:
    """W' in float32, or for a bias vector b + s times the bias of B. Inputs are not changed.

    Args:
        weight: W (N, K), stored (K, N) where ``transposed``; or b (N,).
        A, B: (r, K) and (N, r); None for a bias vector.
        magnitude: m (N,), or None without DoRA.
        bias: (N,), for a bias vector only.
        scale: s.
    """
    if A is None or B is None:
        return weight if bias is None else weight + bias * scale
    product = B @ A
    total = weight + (product.T if transposed else product) * scale
    if magnitude is None:
        return total
    norm = torch.linalg.norm(total.T if transposed else total, dim=1)
    factor = (magnitude.reshape(-1) / norm).view(-1, 1)
    return (factor.T if transposed else factor) * total
