from __future__ import annotations

import errno
import shutil

import pytest

from attar.checkpoint.companions import copy_companions, tokenizer_files
from attar.errors import OutputError

FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "merges.txt": "a b",
    "qwen.tiktoken": "x",
    "chat_template.jinja": "{{ x }}",
    "generation_config.json": "{}",
    "LICENSE": "words",
    "licence.txt": "words",
    "NOTICE": "words",
    "USE_POLICY.md": "words",
}
STAYING = {"README.md": "about", "attar.json.bak": "x", "training_args.bin": "x", "notes.txt": "x"}


def test_what_travels_and_what_stays(make, tmp_path):
    source = make(files=FILES | STAYING)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    target = tmp_path / "target"
    target.mkdir()
    (target / "generation_config.json").write_text("older")
    copied = copy_companions(source, target)
    assert copied == sorted([*FILES, "additional_chat_templates/tools.jinja"])
    for name in copied:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "README.md").exists()


def test_links_of_the_hub_cache_become_files(make, tmp_path):
    source = make(files={"blob": "content"})
    (source / "tokenizer.json").symlink_to(source / "blob")
    target = tmp_path / "target"
    target.mkdir()
    copy_companions(source, target)
    assert not (target / "tokenizer.json").is_symlink()
    assert (target / "tokenizer.json").read_text() == "content"


def test_tokenizer_files(make):
    assert tokenizer_files(make(files=FILES)) == [
        "merges.txt",
        "qwen.tiktoken",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_full_disk(make, tmp_path, monkeypatch):
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OutputError, match="no space left"):
        copy_companions(make(), tmp_path)
