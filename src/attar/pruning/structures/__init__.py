"""What can be removed from every layer: one file for each structure, and the table of their names."""

from attar.pruning.structures.heads import HEADS
from attar.pruning.structures.neurons import NEURONS
from attar.pruning.structures.structure import Structure

STRUCTURES: dict[str, Structure] = {"heads": HEADS, "neurons": NEURONS}
