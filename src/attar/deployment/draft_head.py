"""Export of a draft head in a published layout (formats/draft_heads/), and from one layout to another."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from attar.checkpoint.atomic import save_tensors, write_config
from attar.checkpoint.draft_head import published_target
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import check_fits, compare
from attar.errors import AttarError, ModelError, NumericsError
from attar.formats.draft_heads.content import HeadContent
from attar.formats.draft_heads.table import HEAD_LAYOUTS
from attar.models.draft_heads.content import head_content, head_target
from attar.models.draft_heads.kind import is_draft_head
from attar.progress import Progress


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot be written in the layout asked for.

    Raises:
        ModelError: it is no draft head, or the layout has no such heads.
    """
    if not is_draft_head(source):
        raise ModelError(
            f"{source.name} is no draft head: format {settings.format} is theirs",
            hint="train one with attar train-head MODEL -o HEAD --head KIND",
        )
    head, kinds = _content(source, settings), HEAD_LAYOUTS[settings.format].KINDS
    if head.kind not in kinds:
        others = ", ".join(name for name, layout in HEAD_LAYOUTS.items() if head.kind in layout.KINDS)
        raise ModelError(
            f"{source.name} is a head of kind {head.kind}: format {settings.format} has {', '.join(kinds)}",
            hint=f"--format {others}",
        )
    HEAD_LAYOUTS[settings.format].encode(head)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    layout, head = HEAD_LAYOUTS[settings.format], _content(source, settings)
    config, tensors = layout.encode(head)
    with progress.task("export draft head", total=len(tensors)) as task:
        for name, tensor in tensors.items():
            check_fits(name, tensor)
            task.advance()
    write_config(output.folder / "config.json", config)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_tensors(output.folder / layout.WEIGHTS, stored, metadata={"format": "pt"})
    return _same_head(head, head_content(open_checkpoint(output.folder), head.target))


def _content(source: Checkpoint, settings: ExportSettings) -> HeadContent:
    """The head, with what is known of its target: the model of ``--target``, or the model of the head's
    folder where the folder can be opened."""
    if settings.target:
        target = head_target(open_checkpoint(settings.target))
        return replace(head_content(source, target), target=target)
    with suppress(AttarError):
        named = source.config.get("target") or published_target(source.config)
        target = head_target(open_checkpoint(named))
        return replace(head_content(source, target), target=target)
    return head_content(source)


def _same_head(head: HeadContent, written: HeadContent) -> list[str]:
    """Compare a head with what its folder reads as. Returns what was checked, as sentences.

    Raises:
        NumericsError: they differ.
    """
    if written.values != head.values or written.tensors.keys() != head.tensors.keys():
        raise NumericsError(
            "the folder reads back as another head", hint="the disk may be failing; run it again"
        )
    for name, tensor in head.tensors.items():
        compare(name, tensor, written.tensors[name], None)
    return [f"{len(head.tensors)} tensors and the config of the {head.kind} head read back equal"]
