"""Cards: reading, lineage, licence duties, and what is shown to people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from attar.checkpoint.card import FILE, Card
from attar.checkpoint.inspect import inspect
from attar.checkpoint.licences import duties
from attar.checkpoint.lineage import as_parent, compact
from attar.checkpoint.open import open_checkpoint
from attar.errors import AttarError
from tests.fuzz.targets.safetensors import CONFIG


def seeds(folder: Path) -> list[bytes]:
    """The embedded models' cards, and one with a deeper lineage."""
    import attar

    embedded = Path(attar.__file__).parent / "embedded"
    cards = [path.read_bytes() for path in sorted(embedded.rglob(FILE))]
    root = Card.from_dict(json.loads(cards[0]))
    child = dataclasses.replace(root, stage="prune", parents=(root.as_parent("weights", "f" * 64),))
    grandchild = dataclasses.replace(
        child,
        stage="quantize",
        settings={"scheme": "W4A16", "method": "gptq"},
        parents=(child.as_parent("weights"), child.as_parent("signal")),
        measurements={"perplexity": 7.5, "kl_mean": 0.01},
        licence={"ids": ["apache-2.0"], "evidence": ["config.json"]},
    )
    return [*cards, *(json.dumps(card.to_dict()).encode() for card in (child, grandchild))]


def target(folder: Path) -> Callable[[bytes], bool]:
    """Opens a folder with this card, shows it, and makes a child's lineage of it."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(2, 3)}, folder / "model.safetensors")

    def handle(data: bytes) -> bool:
        (folder / FILE).write_bytes(data)
        try:
            checkpoint = open_checkpoint(folder)
            inspect(checkpoint).render()
            duties(compact([as_parent(checkpoint, "weights", "f" * 64)])).to_dict()
            return True
        except AttarError:
            return False

    return handle
