"""The table of stages: verb, settings class, function.

Entries are import paths, so that reading a recipe imports neither torch nor the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class StageSpec:
    """One verb of the pipeline.

    Args:
        verb: its name in recipes and on the command line.
        settings: ``module:class`` of its settings (torch-free); the module's ``VERSION`` is its code version.
        function: ``module:function``, called as ``function(model, out, settings, *, progress, force, key)``.
        teacher: whether the function also takes ``teacher=``.
        merges: whether it takes the models that its setting ``config`` names instead of one model: called as
            ``function(out, settings, *, models, progress, force, key)``.
    """

    verb: str
    summary: str
    settings: str
    function: str
    example: str
    teacher: bool = False
    merges: bool = False

    def settings_class(self) -> type:
        """The settings dataclass."""
        loaded = load(self.settings)
        assert isinstance(loaded, type)
        return loaded

    def version(self) -> int:
        """Code version of the stage, part of a step's key."""
        return int(import_module(self.settings.partition(":")[0]).VERSION)

    def run(self) -> Callable[..., Any]:
        """The stage function; imports torch."""
        loaded: Callable[..., Any] = load(self.function)
        return loaded


def load(path: str) -> Any:
    """The object named by ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


STAGES: dict[str, StageSpec] = {
    stage.verb: stage
    for stage in (
        StageSpec(
            verb="distill",
            summary="Make a student with fewer layers and train it on its teacher.",
            settings="attar.distillation.settings:DistillSettings",
            function="attar.distillation.stage:distill",
            example="attar distill attar:tiny -o out/student --layers 4 --steps 200",
        ),
        StageSpec(
            verb="train-head",
            summary="Train a draft head for speculative decoding.",
            settings="attar.distillation.head_settings:TrainHeadSettings",
            function="attar.distillation.heads.train:train_head",
            example="attar train-head attar:tiny -o out/head --head eagle3 --steps 500",
        ),
        StageSpec(
            verb="prune",
            summary="Remove weights (zeros), heads, neurons, channels or layers.",
            settings="attar.pruning.settings:PruneSettings",
            function="attar.pruning.stage:prune",
            example="attar prune attar:tiny -o out/pruned --method heads --ratio 0.25",
        ),
        StageSpec(
            verb="recover",
            summary="Train a pruned model to agree with its teacher again.",
            settings="attar.distillation.settings:RecoverSettings",
            function="attar.distillation.stage:recover",
            example="attar recover out/pruned -o out/recovered --teacher attar:tiny --steps 200",
            teacher=True,
        ),
        StageSpec(
            verb="quantize",
            summary="Store the weights in few bits.",
            settings="attar.quantization.settings:QuantizeSettings",
            function="attar.quantization.stage:quantize",
            example="attar quantize attar:tiny -o out/w4 --scheme W4A16 --group-size 64 --method gptq",
        ),
        StageSpec(
            verb="merge",
            summary="Make one model out of several, by mergekit's YAML.",
            settings="attar.merging.settings:MergeSettings",
            function="attar.merging.stage:merge",
            example="attar merge ties.yml -o out/merged",
            merges=True,
        ),
        StageSpec(
            verb="export",
            summary="Write a checkpoint for another engine.",
            settings="attar.deployment.settings:ExportSettings",
            function="attar.deployment.stage:export",
            example="attar export org/name -o name.gguf --type Q4_K_M",
        ),
    )
}

EVALUATE_SETTINGS = "attar.measure.settings:EvaluateSettings"
EVALUATE_VERSION = "attar.measure.settings:VERSION"
"""No stage: a recipe evaluates the checkpoint of every stage."""

COLLECT_SETTINGS = "attar.collection.settings:CollectSettings"
"""No stage: its output is text, before there is a student."""

EXTRACT_SETTINGS = "attar.merging.adapters.settings:ExtractSettings"
"""No stage: its output is an adapter."""

OTHER_SETTINGS = {
    "collect": (COLLECT_SETTINGS,),
    "evaluate": (EVALUATE_SETTINGS,),
    "extract": (EXTRACT_SETTINGS,),
    "plan": ("attar.planner.settings:PlanSettings",),
    "generate": ("attar.runtime.settings:TextSettings", "attar.runtime.settings:EngineSettings"),
    "sweep": ("attar.cluster.settings:ClusterSettings",),
}
"""Settings classes of the verbs that are no stages."""


def settings_classes(verb: str) -> tuple[type, ...]:
    """The settings dataclasses whose fields a verb takes; none for a verb without settings."""
    stage = STAGES.get(verb.replace("_", "-"))
    return (stage.settings_class(),) if stage else tuple(map(load, OTHER_SETTINGS.get(verb, ())))
