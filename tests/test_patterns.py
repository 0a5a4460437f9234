"""Patterns from files and options: as re has them where they are honest, an error in a second where not."""

import re
import threading
import time

import pytest

from attar.deployment.settings import ExportSettings
from attar.errors import AttarError, SettingsError
from attar.formats import compressed_tensors
from attar.formats.gguf.quant_types import overridden
from attar.models.anatomy.parts import matches
from attar.patterns import LONGEST, SECONDS, RegexError, check, matches_start, search
from attar.pruning.settings import WandaSettings
from attar.quantization.plan import _override as override

SLOW = ["(a|aa)+$", "(.+)+Z", "((a*)*)*b", "(a?){60}a{60}b"]
NAMES = ["lm_head", "model.layers.11.self_attn.q_proj", "model.vision.1", ""]


@pytest.mark.parametrize(
    "pattern",
    [
        ".*head$",
        r"model\.layers\.(0|11)\..*(q|k|v)_proj",
        "",
        "vision.*",
        "(?i)MODEL",
        "^(?!.*vision).*_proj$",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_re(pattern, name):
    assert matches_start(pattern, name) == bool(re.match(pattern, name))
    assert search(pattern, name) == bool(re.search(pattern, name))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_of_exponential_time_ends_and_other_threads_run_meanwhile(pattern):
    beats, ended = [], threading.Event()

    def beat():
        while not ended.wait(0.01):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    try:
        search(pattern, "a" * 60 + "c")
    except RegexError as error:
        assert "takes more than" in error.message and len(beats) > 3
    ended.set()
    thread.join()
    assert time.monotonic() - began < 30 * SECONDS


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "*",
        "(?P<x",
        "a" * (LONGEST + 1),
        "(" * 2000 + ")" * 2000,
        "((a{1000}){1000}){1000}",
        "(?:a?){100000}",
    ],
)
def test_what_is_no_pattern_or_too_large_is_refused_at_once(pattern):
    with pytest.raises(RegexError, match=r"config.json: targets: the pattern"):
        check(pattern, "config.json: targets")


def scheme(*targets, ignore=()):
    group = {"targets": [*targets], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
    config = {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": [*ignore]}
    return compressed_tensors.CompressedTensorsConfig(config)


BOMB, NAME = "((a{1000}){1000}){1000}", "a" * 60 + "b"


@pytest.mark.parametrize(
    "use",
    [
        lambda: scheme(f"re:{BOMB}").group(NAME, "Linear"),
        lambda: scheme("Linear", ignore=[f"re:{BOMB}"]).group(NAME, "Linear"),
        lambda: scheme("re:(a|aa)+$").group(NAME, "Linear"),
        lambda: matches(NAME, f"re:{BOMB}"),
        lambda: overridden([NAME], [f"{BOMB}=Q4_K"]),
    ],
    ids=["targets", "ignore", "slow targets", "ignore of a verb", "types of a GGUF"],
)
def test_every_pattern_is_bounded(use):
    with pytest.raises(AttarError, match="the pattern"):
        use()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExportSettings(format="gguf", overrides=(f"{BOMB}=Q4_K",)),
        lambda: WandaSettings(ignore=(f"re:{BOMB}",)),
        lambda: override(f"re:{BOMB}=W4A16"),
        lambda: override("re:(=W4A16"),
    ],
    ids=["export", "prune", "quantize", "quantize, no pattern"],
)
def test_options_are_refused_before_the_work(make):
    with pytest.raises(SettingsError, match="a regular expression"):
        make()
