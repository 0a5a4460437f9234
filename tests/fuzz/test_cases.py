"""Every reader of outside data, on its seeds, on inputs that once broke it, and on some mutations."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS
from tests.fuzz.watch import Watched

CASES = Path(__file__).parent / "cases"


@pytest.fixture(params=TARGETS)
def name(request):
    for package in ("fastapi", "llguidance") if request.param in ("body", "grammar") else ():
        pytest.importorskip(package)
    return request.param


@pytest.mark.few(4)
def test_seeds_are_accepted_and_what_is_made_of_them_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    (tmp_path / "seeds").mkdir()
    seeds = module.seeds(tmp_path / "seeds")
    handle = module.target(tmp_path)
    assert [handle(seed) for seed in seeds] == [True] * len(seeds)
    watched, rng = Watched(handle, tmp_path), random.Random(name)
    for _ in range(150):
        watched(mutate(TARGETS[name], rng.choice(seeds), rng))
    assert not watched.findings


@pytest.mark.parametrize(
    "case", sorted(CASES.glob("*/*")), ids=lambda case: f"{case.parent.name}-{case.name}"
)
def test_what_once_broke_a_reader_is_refused_by_name(case, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    if case.parent.name in ("body", "grammar"):
        pytest.importorskip("llguidance")
    module = importlib.import_module(f"tests.fuzz.targets.{case.parent.name}")
    watched = Watched(module.target(tmp_path), tmp_path)
    watched(case.read_bytes())
    assert not watched.findings
