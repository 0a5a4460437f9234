"""``attar sweep RECIPE --set KEY=VALUE,VALUE`` and ``attar status RUN_DIR``."""

from __future__ import annotations

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
from attar.errors import SweepError
from attar.printable import printable
from attar.progress import Progress


def build_sweep(verb: str) -> Any:
    """The command ``sweep``."""
    parameters = [
        argument("recipe", "a YAML file"),
        text_option(
            "out", "--out", "-o", help="folder of the sweep  [default: runs/<recipe>-sweep]", metavar="DIR"
        ),
        many_option(
            "changes",
            "--set",
            help="values of the recipe, several by commas: key=3,4,5",
            metavar="KEY=VALUE,...",
        ),
        track_option(),
        flag("fresh", "--fresh", help="remove what an earlier sweep made in the folder, and start over"),
        *settings_options(ClusterSettings),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.recipe.runfolder import default_folder
        from attar.recipe.sweep import run_sweep

        recipe = Path(values["recipe"])
        folder = default_folder(recipe)
        out = Path(values["out"]) if values["out"] else folder.with_name(f"{folder.name}-sweep")
        check_local(values["out"] or out)
        settings = read_settings(ClusterSettings, verb, values)
        changes = values["changes"] or ()
        result = run_sweep(recipe, out, changes, settings, fresh=values["fresh"], progress=progress)

        def show() -> None:
            from attar.measure.report.sweep_page import sweep_table

            print(printable(f"{sweep_table(result.record)}\nReport: {result.report}"), flush=True)
            if result.failed:
                message = f"{result.failed} of {len(result.record.runs)} runs failed"
                raise SweepError(message, hint="the same command tries them again")

        return Answer(result.to_dict(), show)

    help = (
        "Run a recipe with every combination of some values, side by side; stages that runs share are done "
        "once. One table, one picture of size against quality. The same command goes on after a stop."
    )
    example = "attar sweep recipes/quickstart.yaml --set stages.gptq.group_size=32,64 -o runs/groups --jobs 2"
    return build_command(verb, help, example, parameters, act, resumes=True)


def build_status(verb: str) -> Any:
    """The command ``status``."""
    parameters = [argument("run_dir", "the folder of a run or of a sweep", "RUN_DIR")]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.recipe.status import read_status

        status = read_status(Path(values["run_dir"]))
        return Answer(status.to_dict(), status.text())

    help = "Show what is done, at work, failed and to be done in a run or a sweep, from its journal."
    return build_command(verb, help, "attar status runs/groups", parameters, act)
