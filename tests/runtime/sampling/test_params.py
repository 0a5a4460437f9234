"""SamplingParams: what is refused, and what becomes equal."""

from __future__ import annotations

import pytest

from attar.errors import SettingsError
from attar.runtime.sampling.params import MAX_STOPS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("n", 0),
        ("n", 1000),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 10_000),
        ("repetition_penalty", 0),
        ("repetition_penalty", 5e-324),
        ("frequency_penalty", float("nan")),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop", "x" * 5000),
        ("stop_ids", [-1]),
        ("stop_ids", [True]),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("min_tokens", 129),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SettingsError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    assert not params.greedy and not params.penalises and not params.biases


def test_lists_become_tuples_and_compare() -> None:
    a = SamplingParams(stop="x", stop_ids=[3], logit_bias={5: 1.0, 2: -1.0})
    b = SamplingParams(stop=["x"], stop_ids=(3,), logit_bias=[(2, -1.0), (5, 1.0)])
    assert a == b and hash(a) == hash(b)
    assert a.biases == ((2, -1.0), (5, 1.0))


def test_max_tokens_may_be_none() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=7).max_tokens is None


@pytest.mark.parametrize(("field", "value"), [("stop_ids", [9]), ("logit_bias", {9: 1.0})])
def test_ids_are_checked_against_the_vocabulary(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    params.fit(10)
    with pytest.raises(SettingsError, match=f"{field} is 9, but must be a token id below 9"):
        params.fit(9)


def test_one_constraint_at_a_time() -> None:
    with pytest.raises(SettingsError, match="json_schema"):
        SamplingParams(regex="a", json_schema="{}")


@pytest.mark.parametrize("field", ["regex", "grammar", "json_schema"])
def test_half_a_surrogate_pair_is_no_grammar(field: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"{field} is .*ud800.*, but must be text without half a surrogate"
    ):
        SamplingParams(**{field: "\ud800"})  # type: ignore[arg-type]
