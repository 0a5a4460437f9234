"""attar: a language model made small and fast, with the evidence that it is still good.

The verbs are functions: :func:`collect`, :func:`distill`, :func:`train_head`, :func:`prune`, :func:`recover`,
:func:`quantize`, :func:`merge`, :func:`extract`, :func:`export`, :func:`evaluate`, :func:`generate`,
:func:`inspect`, :func:`plan`, :func:`run`, :func:`sweep`, :func:`report`, :func:`demo`; :func:`track` tells
trackers of a run; :class:`LLM` runs a model in this process. Names are loaded when first used, so ``import
attar`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attar.checkpoint import Card, open_checkpoint
from attar.checkpoint.open import Checkpoint
from attar.version import __version__ as __version__

if TYPE_CHECKING:
    from attar.errors import (
        AttarError,
        CheckpointError,
        DataError,
        EndpointError,
        MissingExtraError,
        ModelError,
        NumericsError,
        OutputError,
        RecipeError,
        SettingsError,
        UsageError,
    )
    from attar.progress import Terminal
    from attar.recipe.schema import Recipe, load_recipe
    from attar.runtime.llm import LLM
    from attar.runtime.sampling.params import SamplingParams
    from attar.tracking.events import TrackEvent
    from attar.tracking.track import track
    from attar.verbs import (
        collect,
        demo,
        distill,
        evaluate,
        export,
        extract,
        generate,
        inspect,
        merge,
        plan,
        prune,
        quantize,
        recover,
        report,
        run,
        sweep,
        train_head,
    )

__all__ = [
    "LLM",
    "AttarError",
    "Card",
    "Checkpoint",
    "CheckpointError",
    "DataError",
    "EndpointError",
    "MissingExtraError",
    "ModelError",
    "NumericsError",
    "OutputError",
    "Recipe",
    "RecipeError",
    "SamplingParams",
    "SettingsError",
    "Terminal",
    "TrackEvent",
    "UsageError",
    "collect",
    "demo",
    "distill",
    "evaluate",
    "export",
    "extract",
    "generate",
    "inspect",
    "load_recipe",
    "merge",
    "open_checkpoint",
    "plan",
    "prune",
    "quantize",
    "recover",
    "report",
    "run",
    "sweep",
    "track",
    "train_head",
]

_HOMES = {
    "attar.checkpoint": ("Card", "Checkpoint", "open_checkpoint"),
    "attar.progress": ("Terminal",),
    "attar.recipe.schema": ("Recipe", "load_recipe"),
    "attar.runtime.llm": ("LLM",),
    "attar.runtime.sampling.params": ("SamplingParams",),
    "attar.tracking.events": ("TrackEvent",),
    "attar.tracking.track": ("track",),
}
_HOME = {name: "attar.errors" if name.endswith("Error") else "attar.verbs" for name in __all__}
_HOME |= {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'attar' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    if _HOME[name] == "attar.verbs":
        from attar.recipe.signature import describe

        value = globals()[name] = describe(value)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
