"""``attar evaluate MODEL [--reference BASE]``."""

from __future__ import annotations

from typing import Any

from attar.checkpoint.units import bytes_text, number, table
from attar.cli.command import (
    MODEL_HELP,
    Answer,
    argument,
    build_command,
    read_settings,
    settings_options,
    text_option,
)
from attar.cli.launch import launch_if_asked
from attar.cli.stage import launch_options
from attar.cluster.settings import ClusterSettings
from attar.errors import UsageError
from attar.measure.numbers import NORMAL_95
from attar.measure.settings import EvaluateSettings
from attar.progress import Progress
from attar.verbs import check_models, run_evaluate

_EXAMPLE = "attar evaluate out/w4 --reference attar:tiny --tokens 16384"
_ROWS = (
    ("perplexity", "perplexity", ".4f"),
    ("quality kept, 95 % interval", "quality_kept", ".2%"),
    ("accuracy of the next token", "accuracy", ".2%"),
    ("F1 of class 1", "f1", ".2%"),
    ("KL to the reference, mean (nats), 95 %", "kl_mean", ".5f"),
    ("noise floor of that KL (nats), 95 %", "kl_noise_floor", ".6f"),
    ("right in the reference, wrong here", "tokens_lost", ".2%"),
    ("wrong in the reference, right here", "tokens_won", ".2%"),
    ("KL to the reference, 99 %", "kl_p99", ".4f"),
    ("top-1 agreement", "top1_agreement", ".2%"),
    ("answers up to the first difference", "answers_agreement", ".2%"),
    ("bits per weight", "bits_per_weight", ".3f"),
    ("prefill, tokens/s", "prefill_tokens_per_s", ".1f"),
    ("decode, tokens/s", "decode_tokens_per_s", ".1f"),
    ("transformers: prefill, tokens/s", "transformers_prefill_tokens_per_s", ".1f"),
    ("transformers: decode, tokens/s", "transformers_decode_tokens_per_s", ".1f"),
)
_SCORES = ("acc", "acc_norm")
_LABELS = {  # of encoders
    "classification": {"accuracy": "accuracy", "prefill_tokens_per_s": "tokens/s"},
    "masked": {"accuracy": "accuracy of hidden tokens", "prefill_tokens_per_s": "tokens/s"},
}
_OPTIONAL = (
    "f1",
    "quality_kept",
    "kl_noise_floor",
    "tokens_lost",
    "tokens_won",
    "answers_agreement",
    "transformers_prefill_tokens_per_s",
    "transformers_decode_tokens_per_s",
)


def build_evaluate(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", MODEL_HELP),
        text_option(
            "reference",
            "--reference",
            help="the model to compare with: adds KL and agreement",
            metavar="BASE",
        ),
        *settings_options(EvaluateSettings),
        text_option("on", "--on", help="a Ray cluster: local, auto or ray://HOST:PORT", metavar="CLUSTER"),
        *settings_options(ClusterSettings, without=("on", "jobs")),
        *launch_options(),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(EvaluateSettings, verb, values)
        cluster = read_settings(ClusterSettings, verb, values)
        if cluster.on and values["launch"]:
            raise UsageError("--on and --launch", hint="processes of this machine, or workers of a cluster")
        launch_if_asked(values)
        if cluster.on:
            from attar.measure.evaluate_task import evaluate_on

            model, reference = values["model"], values["reference"]
            check_models(model, reference)
            record = evaluate_on(model, settings, cluster, reference=reference, progress=progress)
            return Answer(record, _text(record))
        record = run_evaluate(
            values["model"], settings, reference=values["reference"], progress=progress
        ).to_dict()
        return Answer(record, _text(record))

    return build_command(
        verb, "Measure a model's quality, size, speed and memory.", _EXAMPLE, parameters, act
    )


def _text(record: dict[str, Any]) -> str:
    shown = [row for row in _ROWS if record.get(row[1]) is not None or row[1] not in _OPTIONAL]
    labels = _LABELS.get(record.get("task", ""), {})
    if labels:
        shown = [row for row in shown if row[1] != "decode_tokens_per_s"]
    rows = [(labels.get(key, label), _measured(record, key, form)) for label, key, form in shown]
    tasks = record.get("tasks") or ()
    rows += [(f"{task['name']}, {name}", _share(task, name)) for task in tasks for name in _SCORES]
    rows.append(("bytes", bytes_text(record["bytes"])))
    if "data" in record:
        rows.append(("text", record["data"] + (", held out" if record["held_out"] else ", NOT held out")))
    rows.append(("peak memory", bytes_text(record["peak_rss_bytes"])))
    runner = record.get("runner", "-")
    engine = "transformers" if runner == "transformers" else f"attar, {runner} runner"
    note = f" ({record['runner_note']})" if record.get("runner_note") else ""
    rows += [("engine", f"{engine}{note}"), ("activations", record.get("activations", "-"))]
    if not labels:
        rows.append(("KV cache", record.get("kv_dtype", "-")))
    text = table(("measurement", "value"), rows)
    sample = record.get("sample")
    return f"{text}\n\n{record.get('prompt') or ''}{sample}" if sample else text


def _measured(record: dict[str, Any], key: str, form: str) -> str:
    """``99.42% ± 0.81%``: a figure with its 95 % interval, over rows where that error is known."""
    value, error = record.get(key), record.get(f"{key}_row_stderr", record.get(f"{key}_stderr"))
    interval = "" if value is None or error is None else f" ± {NORMAL_95 * error:{form}}"
    return number(value, form) + interval


def _share(task: dict[str, Any], name: str) -> str:
    """``54.1% ± 1.0%``: a share with its standard error; with a reference its difference from there, and the
    flips: ``54.1% ± 1.0% (-0.5% ± 0.3%: 1.2% lost, 0.7% won)``."""
    share = _with_error(task, name, ".1%")
    if task.get(f"{name}_difference") is None:
        return share
    flips = f"{task[f'{name}_lost']:.1%} lost, {task[f'{name}_won']:.1%} won"
    return f"{share} ({_with_error(task, f'{name}_difference', '+.1%')}: {flips})"


def _with_error(task: dict[str, Any], name: str, form: str) -> str:
    error = task[f"{name}_stderr"]
    return f"{task[name]:{form}}" + (f" ± {error:.1%}" if error is not None else "")
