"""Cuts of models by the units that stay, for tests of what is done with smaller models."""

from attar.models.anatomy.discover import discover
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.cut_plan import CutPlan, check_units, heads_of_groups, same_count


def keep_heads(model, keep):
    """A new model with these KV groups of each block: KV heads and all query heads that read them."""
    blocks = discover(model).blocks
    check_units(keep, [block.attention.kv_heads for block in blocks], "KV head groups")
    same_count(keep, "KV head groups")
    pairs = zip(blocks, keep, strict=True)
    return cut_model(model, CutPlan(heads=tuple(heads_of_groups(b.attention, kept) for b, kept in pairs)))


def keep_neurons(model, keep):
    """A new model with these MLP neurons of each block."""
    return cut_model(model, CutPlan(neurons=tuple(tuple(kept) for kept in keep)))
