"""Which teacher layers a student starts from."""

import pytest

from attar.distillation.layer_map import layer_map
from attar.errors import SettingsError


@pytest.mark.parametrize(
    ("kind", "teacher", "student", "wanted"),
    [
        ("uniform", 12, 6, [0, 2, 4, 7, 9, 11]),
        ("uniform", 8, 8, list(range(8))),
        ("uniform", 8, 1, [7]),
        ("ends", 8, 5, [0, 1, 2, 6, 7]),
        ("last", 8, 3, [5, 6, 7]),
    ],
)
def test_maps(kind, teacher, student, wanted):
    assert layer_map(kind, teacher, student) == wanted


@pytest.mark.parametrize("kind", ["uniform", "ends", "last"])
def test_every_map_is_ascending_and_distinct(kind):
    for teacher in range(1, 20):
        for student in range(1, teacher + 1):
            got = layer_map(kind, teacher, student)
            assert got == sorted(set(got)) and len(got) == student and got[0] >= 0 and got[-1] < teacher


@pytest.mark.parametrize("layers", [0, 9])
def test_too_many_or_none(layers):
    with pytest.raises(SettingsError, match="between 1 and the teacher's 8"):
        layer_map("uniform", 8, layers)
