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
    assert {"mixed", *(store_feature(name) for name in FORMATS)} == set(STORES)


@pytest.mark.parametrize("pair", itertools.combinations(FEATURES, 2))
def test_every_pair_has_one_answer(pair):
    one, two = pair
    assert reason(one, two) == reason(two, one)
    asked = {one: ("first", 1), two: ("second", 2)}
    if reason(one, two) is None:
        check_together(asked)
    else:
        assert len(reason(one, two).split()) >= 5
        with pytest.raises(SettingsError, match="second is 2, but must be something else with first=1: "):
            check_together(asked)


def test_refusals_name_known_features_in_one_order():
    for one, two in REFUSED:
        assert one in FEATURES and two in FEATURES and (two, one) not in REFUSED


def asked(*features):
    return {feature: (f"set_{feature}", feature.upper()) for feature in features}


def test_the_first_pair_is_named_by_its_settings():
    with pytest.raises(SettingsError) as actual:
        check_together(asked("chunked_prefill", "kivi", "h2o", "speculation"))
    messages = f"set_h2o is 'H2O', but must be something else with set_kivi='KIVI': {reason('kivi', 'h2o')}"
    assert str(actual.value) == messages
    scheduling = ("prefix_reuse", "fork", "chunked_prefill", "preemption", "speculation")
    check_together(asked("int8", "streaming", *scheduling))


@pytest.mark.parametrize("turned", [False, True])
def test_what_the_model_is_made_of_is_not_asked_to_change(turned):
    features = {"sliding_window": None, **asked("streaming")}
    with pytest.raises(SettingsError) as actual:
        check_together(dict(reversed(features.items())) if turned else features)
    messages = (
        "set_streaming is 'STREAMING', but must be something else with the model's own sliding window: "
    )
    assert str(actual.value).startswith(messages)
