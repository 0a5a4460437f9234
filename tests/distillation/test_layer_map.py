"""Which teacher layers a student starts from."""

import pytest

from attar.distillation.layer_map import layer_map
from attar.distillation.settings import distill_settings
from attar.errors import SettingsError


@pytest.mark.parametrize(
    ("kind", "teacher", "student", "wanted"),
    [
        ("uniform", 12, 6, [0, 2, 4, 7, 9, 11]),
        ("uniform", 8, 8, list(range(8))),
        ("uniform", 8, 1, [7]),
        ("ends", 8, 5, [0, 1, 2, 6, 7]),
        ("last", 8, 3, [5, 6, 7]),
        ("uniform", 8, 0, [0, 2, 5, 7]),
        ("last", 1, 0, [0]),
        ("0,3,6", 8, 0, [0, 3, 6]),
        ("0,3,6", 8, 3, [0, 3, 6]),
        ("10", 12, 1, [10]),
    ],
)
def test_maps(kind, teacher, student, wanted):
    assert layer_map(kind, teacher, student) == wanted


def test_a_fraction_of_the_layers_stays():
    assert [len(layer_map("uniform", teacher, 0, 0.625)) for teacher in (1, 3, 8, 30)] == [1, 1, 5, 18]
    assert layer_map("uniform", 8, 4, 0.625) == layer_map("uniform", 8, 4)  # a number comes first


@pytest.mark.parametrize("kind", ["uniform", "ends", "last"])
def test_every_map_is_ascending_and_distinct(kind):
    for teacher in range(1, 20):
        for student in range(1, teacher + 1):
            got = layer_map(kind, teacher, student)
            assert got == sorted(set(got)) and len(got) == student and got[0] >= 0 and got[-1] < teacher


@pytest.mark.parametrize("layers", [-1, 9])
def test_too_many_or_none(layers):
    with pytest.raises(SettingsError, match="between 1 and the teacher's 8"):
        layer_map("uniform", 8, layers)


@pytest.mark.parametrize(
    ("kind", "layers", "words"),
    [
        ("0,8", 0, "ascending numbers below the teacher's 8 layers"),
        ("3,0", 0, "ascending numbers"),
        ("1,1", 0, "ascending numbers"),
        ("0,3,6", 2, "0 or the 3 of layer_map 0,3,6"),
    ],
)
def test_numbers_that_do_not_fit(kind, layers, words):
    with pytest.raises(SettingsError, match=words):
        layer_map(kind, 8, layers)


@pytest.mark.parametrize("kind", ["even", "", "0,", "0, 3", "-1", "0;3"])
def test_settings_refuse_what_is_no_map(kind):
    with pytest.raises(SettingsError, match="uniform, ends, last, influence, kl, run, or numbers as 0,3,6"):
        distill_settings(layer_map=kind)
