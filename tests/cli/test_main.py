"""What the command sets for the libraries below it."""

import pytest

from attar.cli.main import wait_briefly


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_threads_spin_briefly_unless_the_user_decides(given, wanted):
    environment = dict(given)
    wait_briefly(environment)
    assert environment == wanted
