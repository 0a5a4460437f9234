"""Ranges of the evaluation's settings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from attar.errors import SettingsError
from attar.measure.settings import EvaluateSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 1),
        ("sequence_length", 1),
        ("batch_size", 0),
        ("prompt_tokens", 0),
        ("decode_tokens", 0),
        ("sample_tokens", 0),
        ("answers", 9),
        ("dtype", "int8"),
    ],
)
def test_out_of_range_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        EvaluateSettings(**{field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_settings_do_not_import_torch() -> None:
    code = "import sys, attar.measure.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
