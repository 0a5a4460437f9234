"""What travels comes back the same, and nothing else is read."""

import json

import pytest

from attar.serving.services.messages import (
    MOST_AHEAD,
    VERSION,
    Close,
    Commit,
    DraftSampling,
    Hello,
    Offer,
    Open,
    Ping,
    Pong,
    ProtocolError,
    check_hello,
    decode,
    encode,
)

SAMPLING = DraftSampling(seed=2**64 - 1, sample=1, prompt=2, temperature=0.7, logit_bias=((3, -1.5),))
MESSAGES = [
    Hello(version=VERSION, role="draft", name="é", tokenizer="t", vocabulary=50, context=None),
    Open(request=1, tokens=(1, 2), sampling=SAMPLING, ahead=8, salt="s", trace="cmpl-1"),
    Commit(request=1, base=2, tokens=(), ahead=MOST_AHEAD),
    Offer(request=1, base=2, tokens=(3,)),
    Close(request=1),
    Ping(number=7),
    Pong(number=7),
]
OFFER = {"kind": "offer", "request": 1, "base": 2, "tokens": [3]}


def test_a_frame_comes_back():
    [frame], too_large = encode(MESSAGES)
    assert decode(frame) == MESSAGES and not too_large
    assert encode([]) == ([], [])


@pytest.mark.parametrize("most", [150, 170, 400, 5000])
def test_messages_are_divided_into_frames_of_bounded_bytes(most):
    large = Commit(request=3, base=0, tokens=(123_456,) * 1000, ahead=1)
    messages = [*MESSAGES[2:], large, *[MESSAGES[5]] * 20]
    frames, too_large = encode(messages, most)
    assert all(len(frame) <= most for frame in frames) and too_large == [large]
    assert [one for frame in frames for one in decode(frame)] == [one for one in messages if one is not large]
    assert (len(frames) == 1) == (most == 5000)


def test_what_is_too_large_has_another_in_its_place():
    """Where it stood: what follows may be the last of its request."""
    large = Commit(request=3, base=0, tokens=(123_456,) * 1000, ahead=1)
    messages = [MESSAGES[5], large, MESSAGES[6]]
    [frame], too_large = encode(messages, 1500, lambda one: Close(one.request))
    assert decode(frame) == [MESSAGES[5], Close(3), MESSAGES[6]] and too_large == [large]


def test_no_frame_has_more_messages_than_may_be_read():
    frames, _ = encode([MESSAGES[5]] * 5000)
    assert [len(decode(frame)) for frame in frames] == [4096, 904]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": []},
        {"tokens": [0] * (MOST_AHEAD + 1)},
        {"tokens": [-1]},
        {"tokens": [2**31]},
        {"tokens": [1.0]},
        {"tokens": ["1"]},
        {"base": -1},
        {"base": True},
        {"base": 2**60},
        {"request": None},
        {"kind": "offers"},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_no_offer_is_refused(change):
    with pytest.raises(ProtocolError):
        decode(json.dumps([OFFER | change]).encode())


@pytest.mark.parametrize("frame", [b"", b"{}", b"\xff", b"[" * 100_000, b"[NaN]", json.dumps([OFFER] * 5000)])
def test_what_is_no_frame_is_refused(frame):
    with pytest.raises(ProtocolError) as refused:
        decode(frame)
    assert len(str(refused.value)) < 300


def test_hello_is_checked_on_both_sides():
    draft = Hello(version=VERSION, role="draft", name="small", tokenizer="t", vocabulary=50)
    target = Hello(version=VERSION, role="target", name="large", tokenizer="t", vocabulary=51)
    assert check_hello(draft, "draft", target) is draft and check_hello(target, "target", draft) is target
    for other, words in [
        (Hello(version=VERSION + 1, role="draft", name="small", tokenizer="t", vocabulary=50), "protocol"),
        (Hello(version=VERSION, role="draft", name="small", tokenizer="u", vocabulary=50), "small and large"),
        (Hello(version=VERSION, role="target", name="small", tokenizer="t", vocabulary=50), "role"),
        (Ping(number=1), "hello"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            check_hello(other, "draft", target)
