"""Plans of a tiny model: bytes, refusals, what is measured once, and a run that is killed."""

from __future__ import annotations

import html
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.cli.main import call
from attar.errors import CheckpointError, ModelError, OutputError, UsageError
from attar.planner import cuts, speed
from attar.planner import losses as losses_module
from attar.planner import plan as plan_module
from attar.planner.costs import (
    CARD_FORMATS,
    EMBEDDING,
    HEAD,
    STEP_FORMATS,
    GroupProduct,
    kernel_shapes,
    layer_groups,
    main_scheme,
    schemes_of,
    weight_costs,
)
from attar.planner.cuts import cuts_folder
from attar.planner.gguf_costs import gguf_costs
from attar.planner.page import command_of
from attar.planner.settings import SCHEMES_OF, PlanSettings
from attar.planner.speed import model_kernels, products_of, step_times
from attar.progress import SILENT
from attar.quantization.plan import plan as plan_layers
from attar.quantization.settings import StorageSettings
from attar.recipe.schema import parse_recipe
from attar.runtime import kernel_times
from attar.runtime.kernel_times import KernelShape, KernelTimes
from tests import tiny_models
from tests.formats.gguf import variants
from tests.quantization.packing import pack

QUICK = {"samples": 2, "sequence_length": 16, "batch_size": 2, "check": 1, "progress": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tiny_models.build("llama3", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    return tiny_models.save(built, tmp_path_factory.mktemp("planned") / "m", dtype=torch.bfloat16)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return {**QUICK, "data": str(tmp_path / "text.txt")}


def written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_the_bytes_of_a_mix_are_those_of_its_files(model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model)
    groups = layer_groups(checkpoint)
    costs = weight_costs(checkpoint, groups, SCHEMES_OF["attar"], embedding=True)
    names = SCHEMES_OF["attar"]
    choice = {group: names[(5 * number) % len(names)] for number, group in enumerate(groups)}
    for embedding in ("dense", "int8"):
        schemes = schemes_of(groups, choice)
        bits = {"embedding_bits": 8} if embedding == "int8" else {}
        pack(
            model,
            tmp_path / embedding,
            assigned=schemes,
            scheme=main_scheme(schemes),
            group_size=costs.group_size,
            **bits,
        )
        assert costs.file_bytes({**choice, EMBEDDING: embedding}) == written_bytes(tmp_path / embedding)
    # a recipe that rounds to nearest searches its scales, as the losses are measured
    assert costs.stage(choice, "rtn")["scales"] == "mse" and "scales" not in costs.stage(choice, "gptq")


@pytest.mark.parametrize("kind", ["64", "256", "granitemoe"])
def test_the_bytes_of_a_file_of_llama_cpp_are_known(kind: str, tmp_path: Path) -> None:
    """Of types for 256 inputs, of those for fewer, and of experts in stacks."""
    widths = {"hidden_size": int(kind), "intermediate_size": int(kind)} if kind.isdigit() else {}
    built = tiny_models.build("llama3", **widths) if widths else variants.build(kind)
    folder = tiny_models.save(built, tmp_path / "m", dtype=torch.bfloat16)
    costs = gguf_costs(open_checkpoint(folder), "rtn")
    kinds = {group: list(options) for group, options in costs.table.items()}
    choice = {group: names[(3 * n) % len(names)] for n, (group, names) in enumerate(kinds.items())}
    stage = {name: value for name, value in costs.stage(choice, "rtn").items() if name != "stage"}
    attar.export(folder, tmp_path / "out", **{**stage, "imatrix": "none"}, progress=False)
    (file,) = (tmp_path / "out").glob("*.gguf")
    assert costs.file_bytes(choice) == file.stat().st_size
    tensors = {name: info.block for name, info in open_checkpoint(file).tensors.items()}
    assert set(choice.values()) <= set(tensors.values())


def test_the_products_of_a_mixture(tmp_path: Path) -> None:
    """Of one expert, gate and up as one product, and how many of them a token reads."""
    folder = tiny_models.save(variants.build("qwen3_moe"), tmp_path / "m", dtype=torch.bfloat16)
    checkpoint = open_checkpoint(folder)
    fused = products_of(checkpoint, layer_groups(checkpoint))
    config = checkpoint.config
    width, neurons = config["hidden_size"], config["moe_intermediate_size"]
    routed = {"experts": config["num_local_experts"], "active": config["num_experts_per_tok"]}
    (experts,) = {tuple(products) for group, products in fused.items() if "experts" in group}
    assert experts == (GroupProduct(2 * neurons, width, **routed), GroupProduct(width, neurons, **routed))
    assert all(len(products) == 1 for group, products in fused.items() if "experts" not in group)
    assert fused[HEAD] == [GroupProduct(config["vocab_size"], width)]


def test_times_of_a_mixture_serve_another_machine(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert gets fewer tokens than a step has."""
    folder = tiny_models.save(variants.build("qwen3_moe"), tmp_path / "m", dtype=torch.bfloat16)
    monkeypatch.setattr(kernel_times, "_measure", lambda pool, shape, layers, bits: 1e-6)
    monkeypatch.setattr(speed, "_step", lambda checkpoint, batch, device, progress: 1.0 * batch)
    table = model_kernels(str(folder), [16], SILENT)
    assert table.overhead.keys() == {16} and min(shape.tokens for shape in table.seconds) < 16
    table.write(tmp_path / "times.yaml")
    settings = PlanSettings(speed="decode>=1", hardware=str(tmp_path / "times.yaml"), batch=16)
    checkpoint = open_checkpoint(folder)
    times = step_times(checkpoint, layer_groups(checkpoint), settings, SILENT)
    assert times.seconds(dict.fromkeys(times.groups, "W4A16")) == pytest.approx(16.0, rel=1e-6)


def test_a_method_that_takes_no_stack_of_experts_is_refused_before_any_work(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_models.save(variants.build("granitemoe"), tmp_path / "m")
    with pytest.raises(ModelError, match="--rounding gptq takes experts that are stored one by one"):
        attar.plan(folder, size="1MB", engine="llama.cpp", **options)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [False, True])
def test_a_plan_for_llama_cpp(mixture: bool, model: Path, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_models.save(variants.build("qwen3_moe"), tmp_path / "m") if mixture else model
    size = written_bytes(model) * 2 // (6 if mixture else 3)  # the mixture's are float32
    options = {**options, "engine": "llama.cpp", "method": "rtn"}
    planned = attar.plan(model, tmp_path / "plan.yaml", size=f"{size}B", **options)
    assert planned.point.file_bytes <= size
    few = [f"evaluate.{name}" for name in ("tokens=64", "sequence_length=16", "speed=false", "answers=0")]
    result = attar.run(tmp_path / "plan.yaml", tmp_path / "run", overrides=few, progress=False)
    recipe = result.content["recipe"]
    assert recipe["measured"]["bytes"] == recipe["predicted"]["bytes"] == planned.point.file_bytes


def test_a_plan_fits_its_size_and_its_recipe_says_so(
    model: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "BROKEN", 0.0)
    dense = written_bytes(model)
    found = attar.plan(model, tmp_path / "plan.yaml", size=f"{dense // 2}B", context=32, batch=2, **options)
    point = found.point
    assert point.file_bytes + point.cache_bytes <= dense // 2 and point.cache_bytes > 0
    assert any("attar run may refuse it" in reason for reason in found.reasons)
    recipe = parse_recipe((tmp_path / "plan.yaml").read_text())
    assert recipe.to_dict() == found.recipe.to_dict()
    assert recipe.predicted["bytes"] == point.file_bytes
    assert recipe.predicted["kl_low"] < recipe.predicted["kl"] < recipe.predicted["kl_high"]
    storage: StorageSettings = recipe.stages[0].settings.storage
    assigned = plan_layers(open_checkpoint(model), storage)
    schemes = {site.module: site.scheme.name for site in assigned.sites.values()}
    pack(
        model,
        tmp_path / "out",
        assigned=schemes,
        scheme=storage.scheme,
        group_size=storage.group_size,
        embedding_bits=storage.embedding_bits,
    )
    assert written_bytes(tmp_path / "out") == point.file_bytes
    page = (tmp_path / "plan.html").read_text()
    for row in found.front:  # every point has a command that is a plan of its bytes
        command = command_of(row, found)
        assert html.escape(command, quote=False) in page
        assert f"--size {row.file_bytes + row.cache_bytes}B" in command and "--context 32" in command
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    kinds = set(found.to_frame()["kind"])
    assert {"plan", "front", "uniform"} <= kinds
    losses = [row.kl for row in found.front]
    assert losses == sorted(losses, reverse=True)
    smaller = [row for row in found.uniform if row.file_bytes + found.point.cache_bytes <= dense // 2]
    assert all(found.point.kl <= row.kl for row in smaller)


RECORDING = """
import json, os, signal, sys
import attar
from attar.planner.losses import Losses
from attar.sensitivity import weight_changes

log, kind, count, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])

def recording(kind_of, name_of, real):
    def call(*args):
        with open(log, "a+") as file:
            file.seek(0)
            if kind_of == kind and sum(line.startswith(kind) for line in file) == count:
                os.kill(os.getpid(), signal.SIGKILL)  # in the middle of one that is not finished
            result = real(*args)
            print(kind_of, name_of(*args), file=file)
        return result
    return call

weight_changes._measure = recording(
    "group", lambda _, change: (change.blank.group, change.blank.option), weight_changes._measure
)
Losses._joint = recording(
    "whole",
    lambda _, changes, kv: ({name: change.keywords["grid"] for name, change in changes.items()}, kv),
    Losses._joint,
)
print(json.dumps(attar.plan(**options).to_dict()))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # four processes, beside other work
def test_a_killed_plan_goes_on_after_the_last_measurement(
    model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    """kill -9 among the groups and among the wholes: the same plan, and nothing is measured twice."""
    plan = {"model": str(model), "size": f"{written_bytes(model) * 2 // 3}B", **options}

    def planned(log: str, kind: str = "", count: int = 0) -> Any:
        environment = {**os.environ, "ATTAR_CACHE": str(tmp_path / log), "ATTAR_KERNELS": "off"}
        arguments = [str(tmp_path / f"{log}.log"), kind, str(count), json.dumps(plan)]
        command = [sys.executable, "-c", RECORDING, *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == (-signal.SIGKILL if kind else 0), ended.stderr
        return None if kind else json.loads(ended.stdout.splitlines()[-1])

    for kind, count in (("group", 3), ("whole", 1)):
        planned("killed", kind, count)
    again, whole = planned("killed"), planned("whole")
    assert again == whole
    kept, straight = ((tmp_path / f"{log}.log").read_text().splitlines() for log in ("killed", "whole"))
    assert sorted(kept) == sorted(straight) and len(set(kept)) == len(kept)


@pytest.mark.slow
def test_a_plan_cuts_where_a_cut_and_more_bits_lose_less(
    model: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that loses more than the plan is not taken; one that loses little is cut, recovered and coded, at
    exactly the bytes of the prediction."""
    size = f"{written_bytes(model) // 3}B"
    whole = attar.plan(model, size=size, **options)
    lost = attar.plan(model, size=size, prune="0.2", **options)
    assert lost.point == whole.point and lost.recipe.to_dict() == whole.recipe.to_dict()
    assert "more than all that the plan may lose: not taken" in lost.reasons[-1]
    real = losses_module.CutLosses.joint

    def cheap(self: Any, choice: Any, kv_dtype: str = "auto") -> Any:
        loss = real(self, choice, kv_dtype)
        return replace(loss, kl=loss.kl / 1e6)

    monkeypatch.setattr(losses_module.CutLosses, "joint", cheap)
    cut = attar.plan(model, tmp_path / "plan.yaml", size=size, prune="0.2", recover_tokens=4096, **options)
    assert [stage.stage for stage in cut.recipe.stages] == ["prune", "recover", "quantize"]
    assert cut.reasons[-1].endswith(": taken") and cut.point.name.split(";")[0] in cut.reasons[-1]
    few = [f"evaluate.{name}" for name in ("tokens=64", "sequence_length=16", "speed=false", "answers=0")]
    result = attar.run(tmp_path / "plan.yaml", tmp_path / "run", overrides=few, progress=False)
    recipe = result.content["recipe"]
    assert recipe["measured"]["bytes"] == recipe["predicted"]["bytes"] == cut.point.file_bytes
    assert not [path for path in (tmp_path / "cache/cuts").glob("*/*") if path.is_dir()]


def test_one_plan_at_a_time_has_the_cuts_of_a_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a plan removed what another was reading; one that fails leaves what it made to the next."""
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    settings = PlanSettings(size="1MB", prune="0.2", data="python-stdlib")
    checkpoint = open_checkpoint(model)
    with pytest.raises(KeyError), cuts_folder(checkpoint, settings) as folder:
        (folder / "0.2").mkdir()
        raise KeyError
    with monkeypatch.context() as context, pytest.raises(OutputError, match="another plan"):
        context.setattr(cuts, "try_lock", lambda descriptor: False)
        with cuts_folder(checkpoint, settings):
            pass
    assert (folder / "0.2").exists()
    with cuts_folder(checkpoint, settings):
        pass
    assert not (folder / "0.2").exists() and folder.exists()


@pytest.mark.slow
def test_the_smallest_plan_of_a_quality_promises_it(model: Path, options: dict[str, Any]) -> None:
    few = {**options, "check": 3}
    uniform = {row.name: row for row in attar.plan(model, size="1GB", **options).uniform}
    bound = uniform["W4A16"].kl
    planned = attar.plan(model, quality=f"kl<={bound}", **few)
    assert planned.point.kl <= bound
    assert planned.point.file_bytes <= uniform["W4A16"].file_bytes


@pytest.mark.slow
def test_an_impossible_budget_names_the_nearest(
    model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is measured before a size is refused")

    with monkeypatch.context() as patch:
        patch.setattr(losses_module, "measure", nothing)
        with pytest.raises(UsageError, match=r"size is '1KB', but must be at least [\d,]+ bytes") as refused:
            attar.plan(model, size="1KB", context=32, **options)
    least = str(refused.value.hint).split()[1]
    attar.plan(model, size=least, context=32, **options)
    with pytest.raises(UsageError, match=r"no recipe has \d+B and kl<=1e-9; the nearest are \d+B: kl 0\.\d+"):
        attar.plan(model, size=least, context=32, quality="kl<=1e-9", **options)
    with pytest.raises(UsageError, match="context"):
        attar.plan(model, size="1GB", context=10**8, **options)


def test_a_machine_of_other_shapes_is_refused_before_any_work(
    model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    table = KernelTimes("another machine", 4, {KernelShape("int4", 3, 5, 1): 1e-6})
    table.write(tmp_path / "times.yaml")
    with pytest.raises(
        CheckpointError, match=r"times\.yaml has no time of bf16 \d+ x \d+ with 1 tokens"
    ) as error:
        attar.plan(model, speed="decode>=1", hardware=str(tmp_path / "times.yaml"), **options)
    assert error.value.hint == "attar bench MODEL --kernels --batch 1 on that machine"


@pytest.mark.parametrize("formats", [STEP_FORMATS, CARD_FORMATS], ids=["processor", "card"])
def test_a_speed_of_another_machine_is_its_products_and_the_rest_of_a_step(
    formats: dict[str, str], model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    """A card has a kernel for each width, and other formats' names."""
    checkpoint = open_checkpoint(model)
    fused = products_of(checkpoint, layer_groups(checkpoint))
    products = [product for members in fused.values() for product in members]
    slow = {kind: 1.0 + n for n, kind in enumerate(sorted(set(formats.values())))}
    seconds = {
        shape: 1e-9 * shape.rows * shape.columns * slow[shape.format]
        for shape in kernel_shapes(products, 2, formats)
    }
    path = tmp_path / "times.yaml"
    KernelTimes("another machine", 0, seconds, overhead={2: 0.5}).write(path)
    plan = attar.plan(model, size="1GB", speed="decode>=0.1", hardware=str(path), batch=2, **options)
    row = next(row for row in plan.uniform if row.name == "W3A16")
    weights = {group: sum(p.rows * p.columns for p in members) for group, members in fused.items()}
    step = 0.5 + math.fsum(
        1e-9 * weights[group] * slow[formats["dense" if group == EMBEDDING else "W3A16"]] for group in fused
    )
    assert row.decode_tokens_per_s == pytest.approx(2 / step)
    if formats is CARD_FORMATS:
        with pytest.raises(CheckpointError, match="has no time of") as error:
            attar.plan(model, speed="decode>=0.1", hardware=str(path), batch=3, **options)
        assert error.value.hint == "attar bench MODEL --kernels --device cuda --batch 3 on that machine"


def test_a_quantized_model_is_refused(model: Path, options: dict[str, Any], tmp_path: Path) -> None:
    pack(model, tmp_path / "q")
    with pytest.raises(ModelError, match="is quantized already"):
        attar.plan(tmp_path / "q", size="1GB", **options)


def test_the_command_line(capsys: pytest.CaptureFixture[str], options: dict[str, Any]) -> None:
    assert call(["plan"]) != 0
    assert "a model is missing" in capsys.readouterr().err
    assert call(["plan", "attar:tiny", "--quality", "good"]) != 0
    assert "--quality is 'good', but must be a bound such as kl<=0.05" in capsys.readouterr().err
    assert call(["plan", "attar:tiny", "-o", "no/such/folder/plan.yaml"]) != 0
    assert "cannot be written" in capsys.readouterr().err
    assert call(["plan", "attar:tiny", "--for", "tgi"]) != 0
    assert "attar, vllm or llama.cpp" in capsys.readouterr().err
    assert call(["plan", "--history"]) == 0
    assert "no plan was run here yet" in capsys.readouterr().out
