"""Who wrote what is learned from, and whether the licences of all of them allow it."""

from __future__ import annotations

from collections.abc import Sequence

from attar.checkpoint.card import Parent
from attar.checkpoint.licence_gate import check_licences
from attar.checkpoint.lineage import as_parent
from attar.checkpoint.open import Checkpoint
from attar.data.provenance import provenance
from attar.distillation.settings import RowSettings
from attar.progress import Progress


def check_authors(
    source: Checkpoint,
    signals: Sequence[Checkpoint],
    settings: RowSettings,
    progress: Progress,
    *,
    signal: bool = False,
) -> tuple[Parent, ...]:
    """Refuse what a licence of the weights, of a teacher or of the text forbids. Returns the authors of the
    text, as far as anything says who they are.

    Args:
        signal: whether the text is taught as a teacher's answers, so that an unknown author counts.

    Raises:
        LicenceError: a licence forbids it.
    """
    authors = provenance(settings.data, signal=signal)
    lineage = [as_parent(source, "weights"), *(as_parent(item, "signal") for item in signals), *authors]
    check_licences(lineage, settings.licence, progress)
    return authors
