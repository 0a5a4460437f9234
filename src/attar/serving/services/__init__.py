"""Draft, target and coordinator as services: drafts are offers on a committed length.

    offer       (request, base, tokens): "after the first ``base`` tokens of this request I guess these"
    messages    what travels, and its bounds            offers      what of an offer is a draft now
    offer_proposer   the engine's side: sends commits, reads offers, waits where that pays
    demand      how far a drafter drafts while its drafts are used, and while they are not
    draft_service    the drafter's side: drafts on while the target verifies
    channel, draft_client, replicas                     streams over gRPC, and which drafter serves a request
    target_service, target_client, coordinator          the engine in another process than the API

A drafter is never trusted: whatever it offers is verified by the target as any draft
(``speculate/verify.py``), so an offer that is late, doubled, reordered or wrong costs at most time.
"""
