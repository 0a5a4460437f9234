"""Who holds most gives way; what was forgotten counts no more."""

from __future__ import annotations

import random

import pytest

from attar.runtime.fair_cache import FairCache


@pytest.mark.parametrize("bound", [(64, None), (10**6, 640)])
def test_one_owner_evicts_its_own(bound: tuple[int, int | None]) -> None:
    cache = FairCache[str](*bound)
    cache.put("alice", "a", "mine", 10)
    for number in range(1000):
        cache.put("bob", number, "his", 10)
    assert cache.get("alice", "a") == "mine" and cache.get("bob", "a") is None
    assert cache.get("bob", 999) == "his" and cache.get("bob", 0) is None
    assert len(cache) == 64 and cache.bytes == 640


def test_the_last_used_stays() -> None:
    cache = FairCache[int](3)
    for key in "abc":
        cache.put("", key, 1)
    assert cache.get("", "a") == 1
    cache.put("", "d", 1)
    assert cache.get("", "a") == 1 and cache.get("", "b") is None


def test_bytes_are_those_of_what_is_kept() -> None:
    """After any puts, replacements, deletions and evictions."""
    draws, cache = random.Random(3), FairCache[int](20, 300)
    for _ in range(3000):
        owner, key = draws.choice("abc"), draws.randrange(15)
        if draws.random() < 0.3:
            held = cache.get(owner, key) is not None
            assert cache.delete(owner, key) == held and cache.get(owner, key) is None
        else:
            size = draws.randrange(320)
            cache.put(owner, key, size, size)
        values = [cache.get(owner, key) for owner in "abc" for key in range(15)]
        sizes = [value for value in values if value is not None]
        assert cache.bytes == sum(sizes) <= 300 and len(cache) == len(sizes) <= 20
    for owner in "abc":
        for key in range(15):
            cache.delete(owner, key)
    assert cache.bytes == len(cache) == 0 and not cache.delete("a", 0)
