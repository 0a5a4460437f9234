"""The table of verbs: name, one line, and what builds the command. Printing it imports none of them."""

from __future__ import annotations

from attar.recipe.stages import STAGES

_STAGE = "attar.cli.stage:build"

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("Run the main job on the embedded model.", "attar.cli.run:build_demo"),
    "run": ("Run a recipe; goes on where it was stopped.", "attar.cli.run:build_run"),
    **{
        verb: (stage.summary, "attar.cli.merge:build" if stage.merges else _STAGE)
        for verb, stage in STAGES.items()
    },
    "extract": ("Write the difference of two models as a LoRA adapter.", "attar.cli.extract:build"),
    "evaluate": ("Measure quality, size, speed and memory.", "attar.cli.evaluate:build"),
    "generate": ("Continue a prompt.", "attar.cli.generate:build"),
    "chat": ("Talk with a model.", "attar.cli.chat:build"),
    "bench": ("Measure how fast a model answers.", "attar.cli.bench:build"),
    "serve": ("Serve a model over HTTP, as OpenAI's API does.", "attar.cli.serve:build"),
    "inspect": (
        "Show what a checkpoint is and where it comes from.",
        "attar.cli.inspect:build",
    ),
    "plan-kv": ("Show what a KV cache takes, and what fits a budget.", "attar.cli.plan_kv:build"),
    "report": ("Build the report of a run again.", "attar.cli.report:build"),
}
