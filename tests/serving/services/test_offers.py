"""Whatever arrives in whatever order, a draft is a continuation of the newest offer that agrees."""

import random

from attar.serving.services.messages import Offer
from attar.serving.services.offers import Offers


def test_an_offer_on_an_older_length_is_good_as_far_as_it_agrees():
    offers = Offers(50)
    offers.open(1, 3)
    assert offers.put(Offer(1, 3, (4, 5, 6, 7))) == "new"
    assert offers.draft(1, [1, 2, 3]) == (4, 5, 6, 7)
    offers.commit(1, 5)
    assert offers.draft(1, [1, 2, 3, 4, 5]) == (6, 7)
    assert offers.draft(1, [1, 2, 3, 4, 9]) == ()
    assert offers.draft(1, [1, 2, 3, 4, 5, 6, 7, 8]) == ()


def test_the_newest_base_wins_then_the_longest():
    offers = Offers(50)
    offers.open(1, 5)
    assert offers.put(Offer(1, 5, (9,))) == "new"
    assert offers.put(Offer(1, 4, (8, 9, 7))) == "stale"
    assert offers.put(Offer(1, 5, (9,))) == "stale"
    assert offers.put(Offer(1, 5, (9, 3))) == "new"
    offers.commit(1, 9)
    assert offers.put(Offer(1, 6, (1, 2, 3))) == "stale"


def test_what_no_honest_drafter_sends_is_wrong():
    offers = Offers(50)
    offers.open(1, 5)
    assert offers.put(Offer(1, 6, (1,))) == "wrong"
    assert offers.put(Offer(1, 5, (1, 50))) == "wrong"
    assert offers.put(Offer(2, 5, (1,))) == "unknown"
    offers.close(1)
    assert offers.put(Offer(1, 5, (1,))) == "unknown" and len(offers) == 0


def test_any_order_gives_the_offer_that_brute_force_picks():
    """Of all offers so far: the newest base, then the longest; the rest of it where it agrees."""
    draws = random.Random(1)
    for _ in range(300):
        tokens = [draws.randrange(3) for _ in range(30)]
        offers, arrived, length = Offers(3), [], 5
        offers.open(7, length)
        for _ in range(25):
            if draws.random() < 0.4:
                length = min(length + draws.randint(1, 3), 20)
                offers.commit(7, length)
            base = draws.randint(max(length - 4, 0), length)
            guess = [
                token if draws.random() < 0.8 else draws.randrange(3) for token in tokens[base : base + 6]
            ]
            offer = Offer(7, base, tuple(guess[: draws.randint(1, 6)]))
            outcome = offers.put(offer)
            if base + len(offer.tokens) > length:
                arrived.append(offer)
            else:
                assert outcome == "stale"
            best = max(arrived, key=lambda one: (one.base, len(one.tokens)), default=None)
            want = ()
            if best is not None:
                decided = length - best.base
                kept = next(
                    one for one in arrived if (one.base, len(one.tokens)) == (best.base, len(best.tokens))
                )
                if list(kept.tokens[:decided]) == tokens[best.base : length]:
                    want = kept.tokens[decided:]
            assert offers.draft(7, tokens[:length]) == want
