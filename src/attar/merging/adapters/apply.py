"""A model with a LoRA adapter added, as a view: every walk over dense tensors runs on it unchanged.

Hu et al. 2021, "LoRA", arXiv 2106.09685, equation 3; Kalajdzievski 2023, "rsLoRA", arXiv 2312.03732;
Liu et al. 2024, "DoRA", arXiv 2402.09353, equation 5. Files as peft writes them.

    W' = W + s B A                          s = alpha / r, with rsLoRA alpha / sqrt(r)
    W' = m (W + s B A) / |W + s B A|        DoRA; the norm over each output's inputs

    W (N, K) weight; A (r, K), B (N, r); m (N,) magnitudes. An embedding's A is (r, V), B (d, r), and
    (s B A)^T is added; so it is with weights that are stored (K, N), as GPT-2's.

Everything is computed in float32 and rounded once, to the type in which the weight is stored. In float32 the
bits are those of peft's ``merge_and_unload``.

Differs from peft: where head and embedding are one tied tensor and the adapter changes only one of them, or
each in its own way, the result has a head of its own, so that it computes what model and adapter did; peft
changes the shared tensor, and with it the other one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import hashing
from attar.checkpoint.parts import part_of
from attar.checkpoint.tensors import TORCH, read_tensor
from attar.formats.readers import DecodedInfo
from attar.kernels.threads import one_thread
from attar.merging.adapters.files import CONFIG, HEAD, WEIGHTS, Change, find_changes, read_adapter_config


class Adapted:
    """A view of a checkpoint with an adapter added to its weights as they are asked for.

    Args:
        checkpoint: the model: a checkpoint, or a view of one with its weights decoded.
        folder: the adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Attributes:
        decodes: True: tensors have no bytes of their own in a file.
        path: the model's folder.
        name: ``model+adapter``.
        config: the model's; with ``tie_word_embeddings`` false where the adapter parts head and embedding.
        tensors: what there is, by name.

    Raises:
        CheckpointError: a file of the adapter is missing or damaged.
        ModelError: the adapter is of another kind, or something in it has no place in the model; names it.
    """

    decodes = True

    def __init__(self, checkpoint: Any, folder: Path) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.path, self.name = checkpoint.path, f"{checkpoint.name}+{folder.name}"
        self.config: dict[str, Any] = dict(checkpoint.config)
        self.adapter = read_adapter_config(folder)
        self.changes = find_changes(checkpoint, folder, self.adapter)
        if HEAD in self.changes and HEAD not in checkpoint.tensors:
            self.config["tie_word_embeddings"] = False
        self.tensors: dict[str, Any] = dict(checkpoint.tensors)
        for name, change in self.changes.items():
            self.tensors[name] = self._info(name, change)
        self._resize()

    def _info(self, name: str, change: Change) -> DecodedInfo:
        info = self.checkpoint.tensors[change.source]
        shape = change.whole.shape if change.whole else info.shape
        return DecodedInfo(name, info.dtype, tuple(shape), change.source)

    def _resize(self) -> None:
        """Let the config say the rows of an embedding that the adapter replaces by a larger one."""
        for name, change in self.changes.items():
            rows = self.tensors[name].shape[0]
            if change.whole is not None and part_of(name) == "embedding":
                old = self.checkpoint.tensors[change.source].shape[0]
                if rows != old and self.config.get("vocab_size") == old:
                    self.config["vocab_size"] = rows

    @property
    def card(self) -> Any:
        """The model's card."""
        return self.checkpoint.card

    @property
    def source(self) -> Path:
        """What a person would give to open the model again."""
        source: Path = self.checkpoint.source
        return source

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold the tensors: the model's and the adapter's."""
        return [*self.checkpoint.weight_files, self.folder / WEIGHTS]

    def fingerprint(self) -> str:
        """SHA-256 over the model's fingerprint and the adapter's files."""
        files = [hashing.sha256_file(self.folder / name) for name in (CONFIG, WEIGHTS)]
        return hashing.sha256_text(hashing.canonical_json([self.checkpoint.fingerprint(), *files]))

    def load(self, name: str) -> Tensor:
        """One tensor, the adapter added, in the type in which the model stores it.

        Raises:
            CheckpointError: there is no such tensor.
        """
        change = self.changes.get(name)
        if change is None:
            untouched: Tensor = self.checkpoint.load(name)
            return untouched
        start: Tensor = (
            read_tensor(change.whole) if change.whole is not None else self.checkpoint.load(change.source)
        )
        dtype: torch.dtype = getattr(torch, TORCH[self.checkpoint.tensors[change.source].dtype])
        if change.A is None and change.bias is None:
            return start.to(dtype)
        with one_thread():
            return adapted(
                start.float(),
                *(
                    None if info is None else read_tensor(info).float()
                    for info in (change.A, change.B, change.magnitude, change.bias)
                ),
                scale=change.scale,
                transposed=change.transposed,
            ).to(dtype)


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
    """W' in float32, for a weight; or for a bias vector, b + s times the bias of B. Inputs are not changed.

    Args:
        weight: W (N, K), stored (K, N) where ``transposed``; or b (N,).
        A: (r, K), or None for a bias vector.
        B: (N, r), or None.
        magnitude: m (N,), or None without DoRA.
        bias: (N,), for a bias vector only.
        scale: s.
        transposed: see ``weight``.
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
