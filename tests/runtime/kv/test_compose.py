"""The table of what works together: every pair has an answer, and each refusal a sentence."""

import itertools

import pytest

from attar.errors import SettingsError
from attar.runtime.kv.compose import (
    EVICTIONS,
    FEATURES,
    REFUSED,
    STORES,
    check_together,
    reason,
    store_feature,
)
from attar.runtime.kv.evict import EVICTIONS as METHODS
from attar.runtime.kv.store import STORES as FORMATS


def test_the_table_knows_every_store_and_method():
    assert set(EVICTIONS) == set(METHODS)
    assert {store_feature(name) for name in FORMATS} == set(STORES)


@pytest.mark.parametrize("pair", itertools.combinations(FEATURES, 2))
def test_every_pair_has_one_answer(pair):
    one, two = pair
    assert reason(one, two) == reason(two, one)
    if reason(one, two) is None:
        check_together(one, two)
    else:
        assert len(reason(one, two).split()) >= 5
        with pytest.raises(SettingsError, match=two):
            check_together(one, two)


def test_refusals_name_known_features_in_one_order():
    for one, two in REFUSED:
        assert one in FEATURES and two in FEATURES and (two, one) not in REFUSED


def test_the_first_pair_is_named():
    with pytest.raises(SettingsError, match="kivi is 'on', but must be off together with h2o: KIVI's"):
        check_together("chunked_prefill", "kivi", "h2o")
    check_together(
        "int8", "streaming", "prefix_reuse", "fork", "chunked_prefill", "preemption", "speculation"
    )
