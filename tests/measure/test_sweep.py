"""The record of a sweep: what distinguishes its runs."""

from __future__ import annotations

import pytest

from attar.measure.sweep import SweepRecord, SweepRun, distinctions


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["quantize.scheme=W3A16", "quantize.scheme=W4A16"], ["W3A16", "W4A16"]),
        (["prune.ratio=0.25", "prune.ratio=0.5"], ["0.25", "0.5"]),
        (["quantize.rotate=true", "quantize.rotate=false"], ["true", "false"]),
        (
            ["quantize.scheme=W3A16+quantize.group_size=32", "quantize.scheme=W4A16+quantize.group_size=64"],
            ["W3A16 group size 32", "W4A16 group size 64"],
        ),
        (
            ["heads.ratio=0.2+neurons.ratio=0.3", "heads.ratio=0.2+neurons.ratio=0.4"],
            ["heads.ratio 0.2 neurons.ratio 0.3", "heads.ratio 0.2 neurons.ratio 0.4"],
        ),
        (
            ["q.keep_zeros=true+q.method=rtn", "q.keep_zeros=true+q.method=gptq"],
            ["keep zeros true rtn", "keep zeros true gptq"],
        ),
        (["recover.steps-of-all_a_3f2c", "recover.steps-of-all_b_9d1e"], ["a_3f2c", "b_9d1e"]),
        (["alone=1"], ["alone=1"]),
        (["a.x=1+b", "a.x=1"], ["a.x=1+b", "a.x=1"]),  # nothing but the end of one
        ([], []),
    ],
)  # fmt: skip
def test_labels_are_what_distinguishes_the_names(names, labels):
    assert distinctions(names) == dict(zip(names, labels, strict=True))


def test_values_with_a_plus_are_no_settings():
    names = ["train.rate=1e+5", "train.rate=2e+5"]
    assert distinctions(names) == {names[0]: "1e", names[1]: "2e"}


def test_settings_are_named_where_the_names_tell():
    def record(*names):
        return SweepRecord("r.yaml", tuple(SweepRun(name, "", None, None) for name in names))

    assert record("quantize.scheme=W3A16", "quantize.scheme=W4A16").settings == ["quantize.scheme"]
    assert record("one", "two").settings == record().settings == []
    assert record("one", "two").as_run() is None
