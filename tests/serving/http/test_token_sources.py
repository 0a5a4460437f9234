"""``attar`` in requests and answers."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from attar.runtime.results import Event
from attar.serving.http.request_handler import merge_events
from tests.serving.http.fake import ANSWER, PROPOSER
from tests.serving.http.test_app import chat, chunks, complete, error, serve

IDS = [letter.encode()[0] for letter in ANSWER]
PROPOSERS = [PROPOSER if index % 2 else "target" for index in range(len(ANSWER))]


@pytest.mark.parametrize("ask", [chat, complete])
def test_each_token_has_an_id_and_a_proposer(ask):
    client, _ = serve()
    body = ask(client, attar={"tokens": True}, max_tokens=50).json()
    assert body["choices"][0]["attar"] == {"token_ids": IDS, "proposers": PROPOSERS}
    pieces = [
        choice["attar"]
        for chunk in chunks(ask(client, attar={"tokens": True}, max_tokens=50, stream=True))
        for choice in chunk["choices"]
        if "attar" in choice
    ]
    assert [token for piece in pieces for token in piece["token_ids"]] == IDS
    assert [name for piece in pieces for name in piece["proposers"]] == PROPOSERS


@pytest.mark.parametrize("ask", [chat, complete])
def test_nobody_else_gets_them(ask):
    client, backend = serve()
    for options in ({}, {"attar": {}}, {"attar": {"tokens": False}}, {"attar": None}):
        assert "attar" not in ask(client, **options).json()["choices"][0]
        assert not backend.asked[-1][1].proposers
        for chunk in chunks(ask(client, stream=True, **options)):
            assert "attar" not in chunk["choices"][0]


def test_wrong_fields_are_named():
    client, _ = serve()
    error(chat(client, attar={"tokens": 1}), 400, param="attar.tokens")
    error(chat(client, attar={"colour": True}), 400, "unknown_parameter", "attar.colour")


def test_a_slow_clients_events_keep_their_proposers():
    events = [
        Event("r", 0, "a", (1,), proposers=("target",)),
        Event("r", 0, "b", (2,), proposers=("suffix",)),
    ]
    assert merge_events(events).proposers == ("target", "suffix")
