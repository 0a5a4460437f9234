"""Put a checkpoint that was made of attar:tiny into the package.

    python scripts/embed.py FOLDER draft        a draft model: src/attar/embedded/draft, attar:draft
    python scripts/embed.py FOLDER head         a draft head: attar:head

Kept are weights, config, tokenizer and card; a model's tokenizer file is a link to that of attar:tiny. The
card has no training curve, lists the files that are there, and its command makes a folder of that name.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.paths import EMBEDDED

ROOT = Path(__file__).parents[1] / "src/attar/embedded"
TOKENIZER = "tokenizer.json"
KEPT = ("config.json", "generation_config.json", "model.safetensors", TOKENIZER, "tokenizer_config.json")


def embed(folder: Path, name: str) -> Path:
    """Copy a checkpoint into the package; returns its folder there."""
    card = open_checkpoint(folder).card
    assert card is not None, f"{folder} has no card"
    target = ROOT / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(path for path in folder.iterdir() if path.name in KEPT):
        if file.name == TOKENIZER:
            same = file.read_bytes() == (ROOT / "tiny" / TOKENIZER).read_bytes()
            assert same, f"{file} is not attar:tiny's"
            (target / TOKENIZER).symlink_to(Path("..") / "tiny" / TOKENIZER)
        else:
            shutil.copyfile(file, target / file.name)
    files = {path.name: sha256_file(path) for path in sorted(target.iterdir())}
    details = {key: value for key, value in card.details.items() if key != "curve"}
    command = re.sub(r" -o \S+ ", f" -o {name} ", card.command, count=1)
    replace(card, name=name, files=files, details=details, command=command).write(target)
    return target


def main() -> None:
    """Embed the folder that the command line names."""
    if len(sys.argv) != 3 or sys.argv[2] not in EMBEDDED[1:]:
        raise SystemExit(f"usage: python scripts/embed.py FOLDER {'|'.join(EMBEDDED[1:])}")
    folder = embed(Path(sys.argv[1]), sys.argv[2])
    size = sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink())
    print(f"attar:{folder.name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
