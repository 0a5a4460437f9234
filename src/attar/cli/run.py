"""``attar run RECIPE``, ``attar demo`` (the same with the embedded recipe) and ``attar report RUN_DIR``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from attar.checkpoint.remote import check_local
from attar.cli.command import (
    Answer,
    argument,
    build_command,
    flag,
    many_option,
    read_settings,
    settings_options,
    text_option,
    track_option,
)
from attar.cluster.settings import ClusterSettings
from attar.printable import printable
from attar.progress import Progress


def build_run(verb: str) -> Any:
    """The command ``run``."""
    parameters = [argument("recipe", "a YAML file"), *_parameters("runs/<name of the recipe>")]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        return _run(Path(values["recipe"]), values, progress)

    help = (
        "Run a recipe: plan, show the plan, then do what is not done yet. The same command after an "
        "interruption goes on where it was; a changed setting does its stage and those after it again."
    )
    example = "attar run recipes/quickstart.yaml -o runs/first --set stages.2.ratio=0.3"
    return build_command(verb, help, example, parameters, act, resumes=True)


def build_demo(verb: str) -> Any:
    """The command ``demo``."""

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.verbs import quickstart

        return _run(quickstart(), values, progress)

    help = (
        "Run the main job on the embedded model: distill, prune, recover, quantize and measure, then show "
        "one table and name the report."
    )
    return build_command(verb, help, "attar demo", _parameters("runs/quickstart"), act, resumes=True)


def build_report(verb: str) -> Any:
    """The command ``report``."""
    parameters = [argument("run_dir", "the folder of a run", "RUN_DIR")]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.verbs import report

        path = report(values["run_dir"])
        return Answer({"report": str(path)}, str(path))

    help = "Build the report of a run again: one HTML file that needs no network."
    return build_command(verb, help, "attar report runs/quickstart", parameters, act)


def _parameters(folder: str) -> list[inspect.Parameter]:
    setting = "change a value of the recipe: key=value; stages by number (from 0) or name"
    return [
        text_option("out", "--out", "-o", help=f"folder of the run  [default: {folder}]", metavar="DIR"),
        many_option("changes", "--set", help=setting, metavar="KEY=VALUE"),
        flag("fresh", "--fresh", help="remove what an earlier run made in the folder, and start over"),
        flag("dry_run", "--dry-run", help="show the plan with about what it takes, and stop"),
        track_option(),
        *settings_options(ClusterSettings),
    ]


def _run(path: Path, values: dict[str, Any], progress: Progress) -> Answer:
    from attar.recipe.runfolder import default_folder
    from attar.recipe.schema import load_recipe

    recipe = load_recipe(path, values["changes"] or ())
    out = Path(values["out"]) if values["out"] else default_folder(path)
    check_local(values["out"] or out)
    if values["dry_run"]:
        return _plan(recipe, out, values["fresh"])
    cluster = read_settings(ClusterSettings, "run", values)
    if cluster.on or cluster.jobs > 1:
        from attar.recipe.variants import run_on_cluster

        result = run_on_cluster(recipe, out, cluster, fresh=values["fresh"], progress=progress)
    else:
        from attar.recipe.run import run_recipe

        result = run_recipe(recipe, out, fresh=values["fresh"], progress=progress)

    def show() -> None:
        from attar.measure.table import print_table

        print_table(result.run)
        lines = [result.verdict(), *result.findings(), result.outcome(), f"Report: {result.report}"]
        print(printable("\n".join(["", *filter(None, lines)])), flush=True)

    return Answer(result.to_dict(), show)


def _plan(recipe: Any, out: Path, fresh: bool) -> Answer:
    from attar.checkpoint.open import open_checkpoint
    from attar.recipe.plan import make_plan
    from attar.recipe.show import plan_dict, plan_text

    plan = make_plan(recipe, out, open_checkpoint(recipe.model), fresh=fresh)
    return Answer(plan_dict(plan), plan_text(plan))
