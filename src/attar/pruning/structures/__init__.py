"""What can be removed from a model: one file for each structure, and the table of their names.

A further structure (the experts of a mixture, say) is a file here and a row of the table; what it removes is
a field of :class:`~attar.models.surgery.cut_plan.CutPlan`, which :mod:`attar.models.surgery.cut_model` cuts
and :mod:`attar.models.surgery.masking` masks.
"""

from attar.pruning.structures.heads import HEADS, QUERY_HEADS
from attar.pruning.structures.hidden import HIDDEN
from attar.pruning.structures.layers import LAYERS
from attar.pruning.structures.neurons import NEURONS
from attar.pruning.structures.structure import Structure

STRUCTURES: dict[str, Structure] = {
    "heads": HEADS,
    "query-heads": QUERY_HEADS,
    "neurons": NEURONS,
    "hidden": HIDDEN,
    "layers": LAYERS,
}
