"""Patterns of foreign checkpoints: as re has them where they are honest, an error in a second where not."""

import re
import time

import pytest

from attar.errors import CheckpointError
from attar.formats import compressed_tensors
from attar.formats.quantization_config import SECONDS, matches_start


@pytest.mark.parametrize(
    "pattern", [".*lm_head$", r"model\.layers\.(0|11)\..*(q|k|v)_proj", "", "vision.*", "(?i)MODEL"]
)
@pytest.mark.parametrize("name", ["lm_head", "model.layers.11.self_attn.q_proj", "model.vision.1", ""])
def test_agrees_with_re(pattern, name):
    assert matches_start(pattern, name) == bool(re.match(pattern, name))


def test_a_pattern_of_exponential_time_is_refused_in_a_second():
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"takes more than .* for 'aaa"):
        matches_start("(a|aa)+$", "a" * 60 + "b")
    assert time.monotonic() - start < 30 * SECONDS


@pytest.mark.parametrize("pattern", ["a" * 5000, "(", "*", "(?P<x"])
def test_what_is_too_long_or_no_pattern_is_refused(pattern):
    with pytest.raises(CheckpointError, match=r"config.json: the pattern"):
        matches_start(pattern, "model")


def test_the_schemes_of_compressed_tensors_are_guarded():
    group = {"targets": ["re:(a|aa)+$"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
    scheme = compressed_tensors.CompressedTensorsConfig(
        {"format": "pack-quantized", "config_groups": {"group_0": group}}
    )
    with pytest.raises(CheckpointError, match="takes more than"):
        scheme.group("a" * 60 + "b", "Linear")
