"""A fake ``vllm`` on the search path, and what it was asked."""

import json
import os
import sys
from pathlib import Path


def install(folder, monkeypatch):
    """Put it on the path; returns the file of what it is asked."""
    program, log = folder / "bin" / "vllm", folder / "asked"
    program.parent.mkdir()
    source = Path(__file__).with_name("fake_vllm.py").read_text()
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_VLLM_LOG", str(log))
    return log


def asked(log):
    return [json.loads(line) for line in log.read_text().splitlines()]
