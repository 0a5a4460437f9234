"""Drafts are not measured unawares on what their model was trained on."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import attar
from attar.checkpoint.atomic import write_json
from attar.checkpoint.card import Card
from attar.checkpoint.lineage import TEXTS
from attar.checkpoint.open import open_checkpoint
from attar.data.seen import record
from attar.measure.speculation.run import held_out_note
from attar.models.loading.load import load_tokenizer

EMBEDDED = Path(attar.__file__).parent / "embedded/draft"


def test_prompts_that_a_draft_was_trained_on_are_named(tmp_path: Path) -> None:
    text = "\n".join(f"def function_{n}(argument): return argument * {n} + {n * n}" for n in range(400))
    (tmp_path / "text.py").write_text(text)
    draft = shutil.copytree(EMBEDDED, tmp_path / "draft")
    assert Card.read(draft) is not None
    tokenizer = load_tokenizer(open_checkpoint(draft))
    settings = SimpleNamespace(data=f"whole:{tmp_path / 'text.py'}", bos="auto", seed=0)
    write_json(
        draft / TEXTS, {"texts": [record("distill", tokenizer, settings, "train", length=64, rows=100)]}
    )
    sets = {
        "code": [tokenizer(text[:800])["input_ids"]],
        "other": [tokenizer(" ".join(f"word{n} other{n}" for n in range(120)))["input_ids"]],
    }
    note = held_out_note(tokenizer, sets, ["attar:tiny", str(draft)])
    assert f"{draft}, set code:" in note and "was read by distill" in note
    assert "set other" not in note and "attar:tiny" not in note
