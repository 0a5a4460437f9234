"""What several tests of this folder begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attar.measure.run_folder import RunRecord, run_from_dict
from attar.measure.subject import Subject
from tests.measure.fake_run import fake_run, write_fake_run
from tests.measure.measure_models import llama, words


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """A random Llama with 64 tokens and a context of 64."""
    return llama(0)


@pytest.fixture(scope="session")
def subject(tiny_model: Any) -> Subject:
    """The tiny model with a tokenizer of 64 words."""
    return Subject(tiny_model, words(), None, "tiny")


@pytest.fixture
def run() -> RunRecord:
    """A made-up run of seven stages."""
    return run_from_dict(fake_run())


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The same run as a folder."""
    return write_fake_run(tmp_path / "run")
