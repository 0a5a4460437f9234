"""An adapter's config from anybody: wrong numbers, patterns and links are refused before any work."""

import json
import time

import pytest

from attar.errors import AttarError, CheckpointError
from attar.models.loading.adapter_files import CONFIG, WEIGHTS, rank_and_scale, read_adapter_config

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]


def written(folder, **entries):
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | entries
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("r", [0, -1, 1.5, "four", None, [], True, 1 << 30]),
        ("lora_alpha", ["x", None, [], float("nan"), float("inf"), 1e300, -1e300, True]),
        (
            "rank_pattern",
            [["q_proj"], "q_proj", 3, {"q_proj": 0}, {"q_proj": "4"}, {"q_proj": None}, {"(": 4}],
        ),
        ("rank_pattern", [{"((a{1000}){1000}){1000}": 4}, {"(" * 3000: 4}]),
        ("alpha_pattern", [{"q_proj": "x"}, {"q_proj": float("nan")}, {"q_proj": [1]}, {"[": 4}, [1]]),
    ],
)
def test_numbers_and_patterns_are_checked_by_name(field, values, tmp_path):
    for value in values:
        with pytest.raises(AttarError, match=field) as caught:
            read_adapter_config(written(tmp_path / "lora", **{field: value}))
        assert CONFIG in caught.value.message and len(caught.value.message) < 1000


@pytest.mark.slow
def test_a_pattern_that_takes_for_ever_ends(tmp_path):
    config = read_adapter_config(written(tmp_path, rank_pattern={"(.+)+Z": 4, "(a|aa)+$": 2}))
    began = time.monotonic()
    assert rank_and_scale(config, NAMES[0]) == (4, 2.0)
    with pytest.raises(AttarError, match=f"{CONFIG}: rank_pattern: the pattern .* takes more than"):
        rank_and_scale(config, "a" * 60 + "b")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [
        ({"q_proj": 2}, (2, 2, 4)),
        ({"_proj": 2, "proj": 2}, (4, 4, 4)),  # whole parts of a name
        ({"layers.1.self_attn.q_proj": 3, "q_proj": 2}, (2, 3, 4)),
        ({".*q_proj": 2, "up_proj": 8}, (2, 2, 8)),
        ({r"^model\.layers\.[1-9]\..*": 6}, (4, 6, 6)),
        ({r"self_attn\.(q|k)_proj": 5}, (5, 5, 4)),
        ({"q_proj|up_proj": 7}, (7, 7, 7)),
    ],
)
def test_patterns_are_read_as_peft_reads_them(pattern, ranks, tmp_path):
    import re

    config = read_adapter_config(written(tmp_path, rank_pattern=pattern))
    assert tuple(rank_and_scale(config, name)[0] for name in NAMES) == ranks
    for name, rank in zip(NAMES, ranks, strict=True):
        keys = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name))
        assert next(keys, 4) == rank


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_files_that_are_links_to_elsewhere_are_refused(name, tmp_path):
    folder = written(tmp_path / "lora")
    (tmp_path / "secret").write_bytes((folder / CONFIG).read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name}: is a link to .*secret, outside"):
        read_adapter_config(folder)
