"""Additivity, correction and history: formulas against independent ones, and files that are damaged."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from attar.errors import RecipeError, SettingsError
from attar.kernels.product import default_activation_bits, default_threads
from attar.models.anatomy.parts import matches
from attar.planner.additivity import corrected_losses, fitted, pair_sum
from attar.planner.correction import PRIORS, WITHIN, Z90, predicted_kl
from attar.planner.costs import EMBEDDING, HEAD, GroupProduct, StepTimes, group_seconds, patterns_of
from attar.planner.settings import PlanSettings
from attar.planner.solve import PlanPoint
from attar.quantization.mixed_precision.allocate import Option
from attar.recipe.plan_history import PlanRecord, append_record, history_file, outcome_line, read_records
from attar.recipe.schema import parse_recipe
from attar.runtime import kernel_times
from attar.runtime.kernel_times import KernelShape, KernelTimes, read_times, times_of

BLOCKS = ("m.0", "m.1")
LOSSES = {"m.0.q": 0.04, "m.0.up": 0.09, "m.0.down": 0.01, "m.1.q": 0.16, "m.1.up": 0.25, "embedding": 0.36}


def test_pairs_are_those_of_one_block() -> None:
    expected = 0.0
    for (g, x), (h, y) in itertools.combinations(LOSSES.items(), 2):
        if g[:3] == h[:3] and g != "embedding" != h:
            expected += 2 * math.sqrt(x * y)
    assert pair_sum(LOSSES, BLOCKS) == pytest.approx(expected)


def test_the_fit_is_least_squares_of_ratios() -> None:
    rng = np.random.default_rng(0)
    sums, pairs = rng.uniform(0.1, 1, 6), rng.uniform(0.1, 1, 6)
    whole = (0.9 * sums + 0.3 * pairs) * rng.uniform(0.95, 1.05, 6)
    design = np.stack([sums / whole, pairs / whole], axis=1)
    expected = np.linalg.lstsq(design, np.ones(6), rcond=None)[0]
    assert fitted(list(sums), list(pairs), list(whole)) == pytest.approx(tuple(expected))


def test_too_few_points_fit_a_factor_alone() -> None:
    assert fitted([1.0, 2.0], [0.1, 0.9], [1.5, 3.0]) == pytest.approx((1.5, 0.0))


def test_corrected_losses_add_up_to_what_was_measured() -> None:
    """With a and b known, the corrected losses of the plan are a S + b P."""
    names = ("x", "y")
    table = {g: [Option("x", 1, loss), Option("y", 2, loss / 4)] for g, loss in LOSSES.items()}
    points = []
    for picks in itertools.islice(itertools.product(names, repeat=len(LOSSES)), 0, 64, 7):
        choice = dict(zip(LOSSES, picks, strict=True))
        parts = {g: LOSSES[g] / (4 if name == "y" else 1) for g, name in choice.items()}
        whole = 0.8 * sum(parts.values()) + 0.5 * pair_sum(parts, BLOCKS)
        points.append(PlanPoint(choice, "auto", 0, 0, whole))
    corrected = corrected_losses(lambda: table, points, BLOCKS, {"auto": 0.0})()
    first = {g: next(o.loss for o in corrected[g] if o.name == name) for g, name in points[0].choice.items()}
    assert sum(first.values()) == pytest.approx(points[0].loss)


def record(loss: float, measured: float, model: str = "m", method: str = "gptq") -> PlanRecord:
    predicted = {"loss": loss, "kl": loss, "kl_low": loss / 2, "kl_high": 2 * loss}
    return PlanRecord("2026-01-01", model, "name", f"{loss}", method, predicted, {"kl": measured})


def test_without_runs_the_prior_counts() -> None:
    mean, spread = PRIORS["gptq"]
    kl = predicted_kl(0.1, "gptq", "m", [record(0.1, 5.0, model="other"), record(0.1, 5.0, method="rtn")])
    assert kl.kl == pytest.approx(0.1 * math.exp(mean))
    assert math.log(kl.high / kl.kl) == pytest.approx(Z90 * math.hypot(spread, WITHIN))


def test_runs_of_the_model_correct_the_prediction_and_narrow_it() -> None:
    before = predicted_kl(0.1, "gptq", "m", [])
    after = predicted_kl(0.1, "gptq", "m", [record(0.1, 0.13), record(0.09, 0.117), record(0.12, 0.156)])
    assert after.kl == pytest.approx(0.13, rel=0.06)
    assert after.high / after.low < before.high / before.low
    near, far = (predicted_kl(0.1, "gptq", "m", [record(loss, 2 * loss)]).kl for loss in (0.1, 10.0))
    assert near > far > before.kl


def test_a_cut_is_no_rounding() -> None:
    """The KL of a cut counts as it is, what is rounded by its factor."""
    alone, coded = predicted_kl(0.1, "gptq", "m", []), predicted_kl(0.4, "gptq", "m", [], cut_loss=0.3)
    assert coded.kl == pytest.approx(0.3 + alone.kl)
    assert coded.low < 0.3 < coded.high and coded.low > alone.low


def test_the_history_survives_damage_and_repetition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    assert read_records() == []
    predicted = {"kl": 0.1, "kl_low": 0.05, "kl_high": 0.2, "bytes": 100}
    for measured in ({"kl": 0.12}, {"kl": 0.12}, {"kl": 0.3}):
        append_record("m", "name", "k1", "gptq", predicted, measured)
    with history_file().open("a") as file:
        file.write(
            '{"date": 1}\nnot json\n{"date": "d", "model": "m", "name": "n", "key": "k", "method": "g", '
        )
    (kept,) = read_records()
    assert kept.measured == {"kl": 0.3} and kept.inside is False
    assert history_file().read_text().count("\n") == 4
    assert outcome_line(predicted, {"kl": 0.12, "bytes": 100}) == (
        "predicted KL 0.1 (0.05 to 0.2), measured 0.12: inside; predicted 100 bytes, measured 100"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("predicted", "[1]"),
        ("predicted", "{speed: 1}"),
        ("measured", "{kl: .nan}"),
        ("predicted", "{kl: yes}"),
    ],
)
def test_a_recipe_with_other_predictions_is_refused(key: str, value: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe:3: {key} is"):
        parse_recipe(f"model: attar:tiny\nstages: [{{stage: quantize}}]\n{key}: {value}\n")


def test_predictions_stay_in_a_recipe() -> None:
    recipe = parse_recipe("model: attar:tiny\nstages: [{stage: quantize}]\npredicted: {kl: 0.1, bytes: 5}\n")
    assert recipe.predicted == {"kl": 0.1, "bytes": 5}
    for text in (recipe.written(), recipe.to_yaml()):
        assert parse_recipe(text).to_dict() == recipe.to_dict()


def test_overrides_name_each_module_once() -> None:
    parts = ("self_attn.q_proj", "mlp.down_proj")
    modules = [f"model.layers.{n}.{part}" for n in range(12) for part in parts]
    schemes = {m: ("W2A16", "W4A16", "W8A16")[(5 * n) % 3] for n, m in enumerate(modules)}
    schemes["single"] = "W8A16"
    patterns = patterns_of({module: scheme for module, scheme in schemes.items() if scheme != "W4A16"})
    for module, scheme in schemes.items():
        named = [name for pattern, name in patterns if matches(module, f"re:{pattern}")]
        assert named == ([] if scheme == "W4A16" else [scheme]), module
    assert len(patterns) <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "large"}, "size is 'large', but must be a size such as"),
        ({"size": "0GB"}, "size is '0GB', but must be a size such as"),
        ({"size": "-5GB"}, "size is '-5GB', but must be a size such as"),
        ({"size": "nanGB"}, "size is 'nanGB', but must be a size such as"),
        ({"size": "infGB"}, "size is 'infGB', but must be a size such as"),
        ({"quality": "kl<=nan"}, "quality is 'kl<=nan', but must be a bound such as kl<=0.05"),
        ({"quality": "kl<=-1"}, "quality is 'kl<=-1', but must be a bound such as kl<=0.05"),
        ({"quality": "kl<=1e999"}, "quality is 'kl<=1e999', but must be a bound such as kl<=0.05"),
        ({"speed": "decode>=nan"}, "speed is 'decode>=nan', but must be a bound such as decode>=40"),
        ({"speed": "decode>=0"}, "speed is 'decode>=0', but must be a bound such as decode>=40"),
        ({"context": "-1"}, "context is '-1', but must be a number of tokens"),
        ({"prune": "nan"}, "prune is 'nan', but must be shares between 0 and 1"),
        ({"prune": "0.1,1.5"}, "prune is '0.1,1.5', but must be shares between 0 and 1"),
        ({"prune": "a bit"}, "prune is 'a bit', but must be shares between 0 and 1"),
        ({"recover_tokens": 4096}, "recover_tokens is 4096, but must be 0 without prune"),
        ({"engine": "tgi"}, "engine is 'tgi'"),
        ({"quality": "0.05"}, "quality is '0.05', but must be a bound such as kl<=0.05"),
        ({"quality": "kl<=0"}, "must be a bound such as kl<=0.05"),
        ({"speed": "40"}, "speed is '40', but must be a bound such as decode>=40"),
        ({"context": "long"}, "context is 'long', but must be a number of tokens"),
        ({"batch": 0}, "batch is 0, but must be at least 1"),
        (
            {"engine": "llama.cpp", "speed": "decode>=40", "hardware": "times.yaml"},
            "hardware is 'times.yaml', but must be this with llama.cpp",
        ),
        ({"engine": "vllm", "speed": "decode>=40"}, "speed is 'decode>=40', but must be empty with vllm"),
        ({"check": -1}, "check is -1"),
        ({"hardware": "times.yaml"}, "hardware is 'times.yaml', but must be this without speed"),
        ({"engine": "llama.cpp", "method": "awq"}, "method is 'awq', but must be another one"),
    ],
)
def test_wrong_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PlanSettings(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_sizes_of_settings() -> None:
    settings = PlanSettings(size="5GB", context="32k", speed="decode >= 12.5", quality="kl<=5e-2")
    assert (settings.bytes, settings.tokens) == (5 * 10**9, 32768)
    assert (settings.tokens_per_second, settings.kl) == (12.5, 0.05)
    assert PlanSettings().kl == 0.02 and PlanSettings(size="5GB").kl == math.inf


def test_a_table_of_kernels_is_read_as_it_was_written(tmp_path: Path) -> None:
    seconds = {KernelShape("int4", 64, 32, 1): 1.5e-6}
    table = KernelTimes("some processor", 2, seconds, bits=8, overhead={1: 2e-4, 4: 3e-4})
    table.write(tmp_path / "t.yaml")
    assert read_times(tmp_path / "t.yaml") == table
    assert table.missing([KernelShape("int4", 64, 32, 1), KernelShape("bf16", 64, 32, 1)]) == [
        KernelShape("bf16", 64, 32, 1)
    ]


def test_products_are_timed_with_the_inputs_that_the_step_rounds_them_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a table of other inputs is measured anew."""
    monkeypatch.setattr(kernel_times, "_measure", lambda pool, shape, layers, bits: float(bits))
    shape, path, bits = KernelShape("int4", 64, 32, 1), tmp_path / "t.yaml", default_activation_bits()
    KernelTimes("here", default_threads(), {shape: 3.0}, bits=24 - bits).write(path)
    assert times_of([shape], path, "here").seconds == {shape: bits / 10}  # less a call, of as many seconds
    KernelTimes("here", default_threads(), {shape: 3.0}, bits=bits).write(path)
    assert times_of([shape], path, "here").seconds == {shape: 3.0}


def test_an_int8_embedding_is_an_int8_head() -> None:
    head = GroupProduct(64, 32)
    kinds = (("bf16", 2.0), ("int8", 1.0), ("int4", 9.0))
    table = KernelTimes("here", 1, {KernelShape(kind, 64, 32, 1): s for kind, s in kinds})
    tied, apart = (StepTimes(group_seconds(table, {group: [head]}, 1), 0.5) for group in (EMBEDDING, HEAD))
    assert (tied.seconds({EMBEDDING: "int8"}), tied.seconds({EMBEDDING: "dense"}), tied.seconds({})) == (
        1.5,
        2.5,
        2.5,
    )
    assert apart.seconds({EMBEDDING: "int8"}) == 2.5


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "kernels: 3\nthreads: 1",
        "kernels: []\nthreads: 1\nbits: 4",
        "kernels: []\nthreads: 1\noverhead: 3",
        "kernels: []\nthreads: 1\noverhead: [{tokens: 1, seconds: -1.0}]",
        "kernels: []\nthreads: 1\noverhead: [{tokens: one, seconds: 1.0}]",
        "threads: 1\nkernels: [{format: int4}]",
        "threads: 1\nkernels: [{format: int5, rows: 1, columns: 1, tokens: 1, seconds: 1.0}]",
        "threads: 1\nkernels: [{format: int4, rows: 1, columns: 1, tokens: 1, seconds: -1.0}]",
        "threads: 1\nkernels: [{format: int4, rows: 1.5, columns: 1, tokens: 1, seconds: 1.0}]",
        ": :",
    ],
)
def test_another_file_is_no_table_of_kernels(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(SettingsError, match="hardware is"):
        read_times(tmp_path / "t.yaml")
    with pytest.raises(SettingsError, match="hardware is"):
        read_times(tmp_path / "none.yaml")
