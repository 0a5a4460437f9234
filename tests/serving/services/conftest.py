"""What the tests of services are held to."""

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that shares a busy core with its engine answers late, and is waited for nonetheless."""
    monkeypatch.setattr("attar.serving.services.offer_proposer.MOST_WAIT", 10.0)
