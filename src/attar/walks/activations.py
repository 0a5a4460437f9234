"""Hidden states between two blocks: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class HiddenStates:
    """Hidden states (B, S, D) by batch number.

    Args:
        folder: where those beyond the limit go.
        limit: bytes held in memory.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit, self.held = folder, limit, 0
        self.kept: dict[int, Tensor | Path] = {}

    def __len__(self) -> int:
        return len(self.kept)

    def __setitem__(self, number: int, value: Tensor) -> None:
        value = value.detach().to("cpu")
        old = self.kept.get(number)
        if isinstance(old, Tensor):
            self.held -= old.nbytes
        if self.held + value.nbytes <= self.limit:
            self.kept[number] = value
            self.held += value.nbytes
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{number}.safetensors"
        save_file({"hidden": value.contiguous()}, file)
        self.kept[number] = file

    def __getitem__(self, number: int) -> Tensor:
        value = self.kept[number]
        if isinstance(value, Tensor):
            return value
        with safe_open(value, framework="pt") as opened:
            hidden: Tensor = opened.get_tensor("hidden").clone()
        return hidden

    def clear(self) -> None:
        """Forget everything, on disk too."""
        for value in self.kept.values():
            if isinstance(value, Path):
                value.unlink(missing_ok=True)
        self.kept.clear()
        if self.folder.is_dir():
            self.folder.rmdir()
