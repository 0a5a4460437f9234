"""Scores of a small model's units, for the tests of criteria."""

from attar.importance.scoring import UnitScoring
from attar.models.anatomy.discover import discover
from attar.pruning.structures import STRUCTURES
from attar.walks.objectives import masked_token_loss, next_token_loss

MASK_TOKEN = 2


def loss_of(anatomy):
    if anatomy.causal:
        return lambda model, tokens: next_token_loss(model(input_ids=tokens).logits, tokens)
    return lambda model, tokens: masked_token_loss(model, tokens, MASK_TOKEN)


def scoring(model, method, batches, work, **options):
    """What a criterion is given."""
    anatomy = discover(model)
    weights = STRUCTURES[method].weights(model, anatomy)
    return UnitScoring(model, anatomy, weights, batches, loss_of(anatomy), work, **options)


def scored(model, method, criterion, batches, work, **options):
    """The scores of a method's units by a criterion."""
    return STRUCTURES[method].criteria[criterion](scoring(model, method, batches, work, **options))
