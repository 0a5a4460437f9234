"""Unstructured pruning from folder to folder: which weights are zero, what stays, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint.inspect import inspect
from attar.checkpoint.open import open_checkpoint
from attar.cli.main import call
from attar.errors import CheckpointError, ModelError, NumericsError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import weight_of
from attar.models.loading.load import load_model
from attar.pruning import layerwise
from attar.pruning.linears import pruned_linears
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from attar.sparsity import NOTHING_PAYS, PATTERN_PAYS, parse_sparsity
from tests import tiny_models
from tests.cases import mostly_slow
from tests.log_lines import LogLines

SMALL = {
    "samples": 4,
    "sequence_length": 32,
    "batch_size": 2,
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}
FAMILIES = ["llama3", "gemma2", "phi3", "gpt2", "opt", "gpt_neox", "bert", "distilbert"]


def save(family, folder, dtype=torch.bfloat16, **changes):
    return tiny_models.save(tiny_models.build(family, **changes), folder / family, dtype=dtype)


def pruned(model, out, **options):
    """The result of a method alone: what it lost is not reconstructed."""
    return prune(model, out, prune_settings(**{"reconstruct": "none", **SMALL, **options}))


def weights(checkpoint, settings=None):
    """The pruned weights (N, K) as stored, by module name."""
    options = (settings or prune_settings(method="magnitude")).options
    linears = pruned_linears(checkpoint, options)
    return {name: linear.turned(checkpoint.load(linear.stored)) for name, linear in linears.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *mostly_slow(((family, "wanda") for family in FAMILIES), [("llama3", "wanda"), ("bert", "wanda")]),
        *((family, "sparsegpt") for family in ("gpt2", "phi3")),
        *((family, "alps") for family in ("gpt2", "llama3")),
        *((family, "magnitude") for family in ("gpt2", "bert")),
    ],
)
def test_n_of_m_everywhere_in_the_blocks_and_nothing_else_changed(family, method, tmp_path):
    before = open_checkpoint(save(family, tmp_path))
    after = pruned(before, tmp_path / "out", method=method, sparsity="2:4")
    linears = pruned_linears(before, prune_settings(method="magnitude").options)
    model = load_model(before)
    assert sorted(linears) == sorted(name for block in discover(model).blocks for name in block.linears)
    assert list(after.tensors) == list(before.tensors)
    stored = {linear.stored for linear in linears.values()}
    for name, info in before.tensors.items():
        assert after.tensors[name].dtype == info.dtype == "BF16"
        assert name in stored or torch.equal(after.load(name), before.load(name)), name
    for name, weight in weights(after).items():
        assert ((weight != 0).unflatten(1, (-1, 4)).sum(-1) == 2).all(), name
        assert torch.equal(weight_of(load_model(after).get_submodule(name)), weight.float())
    assert after.card.details["zeros"]["fraction"] == 0.5


@pytest.mark.few(2)
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_magnitude_is_a_sort(scope, dtype, tmp_path):
    before = open_checkpoint(save("gpt2", tmp_path, dtype))
    after = pruned(before, tmp_path / "out", method="magnitude", sparsity=0.37, scope=scope)
    old, new = weights(before), weights(after)
    groups = [old] if scope == "global" else [{name: weight} for name, weight in old.items()]
    for group in groups:
        entries = torch.cat([weight.flatten() for weight in group.values()])
        kept = torch.cat([new[name].flatten() for name in group])
        gone = torch.argsort(entries.double().abs(), stable=True)[: round(len(entries) * 0.37)]
        threshold = entries[gone[-1]].abs()
        assert int((kept == 0).sum()) == len(gone), "exact to the weight"
        assert torch.equal(kept[entries.abs() > threshold], entries[entries.abs() > threshold])
        assert (kept[entries.abs() < threshold] == 0).all()
    assert not after.card.details.get("precision")


def inputs_of(model, name, batches):
    """The inputs (T, K) of a module in passes of the whole model."""
    inputs = []
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].flatten(0, -2))
    )
    for batch in batches:
        tiny_models.logits(model, batch)
    hook.remove()
    return inputs


def wanda_by_hand(model, batches, sparsity, by_row):
    """Algorithm 1 of the paper: the norms of all inputs of a block from passes of the whole model as it is
    then, with the blocks before pruned and this one not; each row's (or the layer's) smallest scores go."""
    for block in discover(model).blocks:
        norms = {
            name: torch.cat(inputs_of(model, name, batches)).double().square().sum(0).sqrt()
            for name in block.linears
        }
        for name in block.linears:
            weight = weight_of(model.get_submodule(name)).detach()
            scores = weight.double().abs() * norms[name]
            rows = (weight, scores) if by_row else (weight.view(1, -1), scores.view(1, -1))
            for row, score in zip(*rows, strict=True):
                size = sparsity.of or len(row)
                for start in range(0, len(row), size):
                    count = round(size * sparsity.zeros)
                    row[start + score[start : start + size].argsort()[:count]] = 0.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("amount", "compare"), [("0.5", "row"), ("0.5", "layer"), ("2:4", "row")])
def test_wanda_sees_the_inputs_after_the_blocks_pruned_before(amount, compare, tmp_path, monkeypatch):
    before = open_checkpoint(save("llama3", tmp_path, torch.float32))
    batches = list(tiny_models.tokens(load_model(before), batch=6, length=24).split(2))
    monkeypatch.setattr("attar.pruning.task.PruneTask.batches", lambda task: batches)
    options = {"method": "wanda", "sparsity": amount, "compare": compare, "precision": "fp32"}
    after = pruned(before, tmp_path / "out", **options)
    by_hand = wanda_by_hand(load_model(before), batches, parse_sparsity(amount), compare == "row")
    for name, weight in weights(after).items():
        assert torch.equal(weight, weight_of(by_hand.get_submodule(name))), name


@pytest.mark.slow
def test_the_rows_of_the_card_are_those_of_the_files(tmp_path):
    before = open_checkpoint(save("llama3", tmp_path))
    after = pruned(before, tmp_path / "out", method="wanda", sparsity=0.37, allocation="owl")
    details = after.card.details
    stored = weights(after)
    assert [row["name"] for row in details["layers"]] == list(stored)
    for row in details["layers"]:
        assert row["sparsity"] == pytest.approx(float((stored[row["name"]] == 0).double().mean()))
        assert 0 < row["error"] < 1 and row["tokens"] == 128
    total = sum(weight.numel() for weight in stored.values())
    assert details["zeros"]["zeros"] == round(total * 0.37) and details["zeros"]["of"] == total
    assert len({round(row["sparsity"], 3) for row in details["layers"]}) > 1
    assert details["allocation"]["by"] == "owl" and len(details["allocation"]["outliers"]) == 3


def test_a_measured_allocation_is_better_than_equal_fractions(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    before = open_checkpoint(save("smollm", tmp_path, num_hidden_layers=2))
    after = pruned(before, tmp_path / "out", method="magnitude", sparsity=0.6, allocation="measured")
    details = after.card.details
    assert details["allocation"]["kl"] < 0.9 * details["allocation"]["kl_uniform"]
    assert details["zeros"]["zeros"] == round(details["zeros"]["of"] * 0.6)
    uniform = pruned(before, tmp_path / "uniform", method="magnitude", sparsity=0.6)
    model, rows = load_model(before), tiny_models.tokens(load_model(before), batch=8, length=32)
    kl = []
    for checkpoint in (after, uniform):
        p, q = (
            tiny_models.logits(one, rows).double().log_softmax(-1) for one in (model, load_model(checkpoint))
        )
        kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
    assert kl[0] < kl[1], "on other tokens too"
    again = pruned(before, tmp_path / "again", method="magnitude", sparsity=0.6, allocation="measured")
    assert (again.path / "model.safetensors").read_bytes() == (after.path / "model.safetensors").read_bytes()


def test_who_gains_is_said_in_the_terminal_the_card_and_by_inspect(tmp_path):
    model = save("llama3", tmp_path)
    for amount, pays in (("2:4", True), ("1:4", True), ("4:8", False), (0.5, False)):
        seen = LogLines()
        out = prune(
            model,
            tmp_path / "out",
            prune_settings(method="magnitude", sparsity=amount),
            progress=seen,
            force=True,
        )
        assert any(NOTHING_PAYS in line for line in seen.lines) is not pays
        assert not any("text:" in line for line in seen.lines), "magnitude reads no text"
        stated = out.card.details["zeros"]
        assert stated["speed"] == (PATTERN_PAYS if pays else NOTHING_PAYS)
        assert stated["speed"] in (out.path / "README.md").read_text()
        assert f"zeros       {stated['fraction'] * 100:.1f} % of" in inspect(out.path).render()
    assert inspect(model).zeros is None and "zeros" not in inspect(model).render()


def test_a_card_with_other_zeros_is_no_traceback(tmp_path):
    out = prune(save("llama3", tmp_path), tmp_path / "out", prune_settings(method="magnitude"))
    card = json.loads((out.path / "attar.json").read_text())
    for damaged in ("many", {"fraction": "half"}, ["2:4"]):
        card["details"]["zeros"] = damaged
        (out.path / "attar.json").write_text(json.dumps(card))
        assert inspect(out.path).zeros is None


def test_ignored_linears_stay(tmp_path):
    before = open_checkpoint(save("llama3", tmp_path))
    settings = {"method": "wanda", "sparsity": "2:4", "ignore": ("down_proj", "re:layers\\.0\\..*q_proj")}
    after = weights(pruned(before, tmp_path / "out", **settings))
    for name, weight in weights(before).items():
        ignored = name.endswith("down_proj") or name == "model.layers.0.self_attn.q_proj"
        assert torch.equal(after[name], weight) is ignored


REFUSED = [
    ({"sparsity": "3:7"}, r"sparsity is '3:7'.*q_proj has 64 \(21 layers: down_proj, .*a fraction fits"),
    ({"sparsity": "16:64"}, r"down_proj has 96 \(3 layers: down_proj\)"),
    ({"sparsity": 0}, "above 0 and below 1"),
    ({"sparsity": "100%"}, "above 0 and below 1"),
    ({"sparsity": "2:4", "scope": "global"}, "layer with 2:4"),
    ({"method": "wanda", "sparsity": "2:4", "compare": "layer"}, "row with 2:4"),
    ({"sparsity": "2:4", "allocation": "owl"}, "uniform with 2:4"),
    ({"scope": "global", "allocation": "owl"}, "layer with allocation owl"),
    ({"ignore": ("lm_head",)}, "a pattern that some Linear's name matches"),
    ({"ignore": ("re:(",)}, "a regular expression"),
    ({"allocation": "best"}, "uniform, owl or measured"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("options", "problem"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_in_one_line_before_any_work(options, problem, tmp_path):
    with pytest.raises(SettingsError, match=problem) as refusal:
        pruned(save("llama3", tmp_path), tmp_path / "out", **{"method": "magnitude", **options})
    assert "\n" not in refusal.value.message
    assert not list(tmp_path.glob("*out*"))


def test_a_model_of_which_every_linear_is_ignored_is_refused(tmp_path):
    model = save("llama3", tmp_path)
    with pytest.raises(ModelError, match="every Linear is ignored"):
        prune(model, tmp_path / "out", prune_settings(method="magnitude", ignore=("re:.",)))


def test_a_damaged_weight_is_named(tmp_path):
    built = tiny_models.build("llama3")
    built.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    model = tiny_models.save(built, tmp_path / "model")
    for method in ("magnitude", "wanda"):
        with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up_proj"):
            pruned(model, tmp_path / "out", method=method)
    assert not list(tmp_path.glob("*out*"))


def test_magnitude_needs_no_tokenizer(tmp_path):
    model = save("llama3", tmp_path)
    for file in model.glob("token*"):
        file.unlink()
    prune(model, tmp_path / "out", prune_settings(method="magnitude", sparsity="2:4"))
    with pytest.raises(CheckpointError):
        pruned(model, tmp_path / "other", method="wanda", sparsity="2:4")


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"sparsity": "2:4"}, {"allocation": "owl", "sparsity": 0.4}])
def test_an_interrupted_sweep_goes_on_to_the_same_bytes(options, tmp_path, monkeypatch):
    model = save("llama3", tmp_path)
    whole = pruned(model, tmp_path / "whole", method="wanda", **options)
    solved = []

    def dying(self, *arguments):
        solved.append(1)
        if len(solved) == 16:
            raise KeyboardInterrupt
        return original(self, *arguments)

    original = layerwise.LayerPruner._pruned
    monkeypatch.setattr(layerwise.LayerPruner, "_pruned", dying)
    with pytest.raises(KeyboardInterrupt):
        pruned(model, tmp_path / "out", method="wanda", **options)
    done = len(solved)
    out = pruned(model, tmp_path / "out", method="wanda", **options)
    assert len(solved) - done == 21 - 14, "finished blocks are not solved again"
    assert (out.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
    assert out.card.details == whole.card.details


def test_the_command(tmp_path, capsys):
    model = save("smollm", tmp_path)
    arguments = ["prune", str(model), "-o", str(tmp_path / "out"), "--method", "magnitude"]
    assert call([*arguments, "--sparsity", "2:4"]) == 0
    assert call([*arguments, "--sparsity", "2:5", "--force"]) == 2
    assert "sparsity is '2:5'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_order_of_the_methods_on_the_embedded_model(tmp_path):
    """KL to the dense model on held-out text. Wanda is below magnitude here only where it compares whole
    layers, unlike on the large models of its paper; the solvers are far below both."""
    from attar.measure.evaluate import evaluate
    from attar.measure.settings import EvaluateSettings

    rows = {"samples": 16, "sequence_length": 128, "batch_size": 8, "reconstruct": "none"}
    measured = EvaluateSettings(tokens=2048, sequence_length=128, speed=False, sample="")

    def kl(**options):
        settings = prune_settings(**options, sparsity=0.5, **rows)
        out = prune("attar:tiny", tmp_path / "out", settings, force=True)
        return evaluate(out, measured, reference="attar:tiny").kl_mean

    magnitude, sparsegpt, alps = (kl(method=method) for method in ("magnitude", "sparsegpt", "alps"))
    wanda = kl(method="wanda", compare="layer")
    assert magnitude > 1.1 * wanda > 1.5 * sparsegpt > 1.6 * alps, (magnitude, wanda, sparsegpt, alps)


@pytest.mark.few(1)
@pytest.mark.parametrize("reconstruct", ["linear", "block"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "alps", "magnitude", "neurons", "heads"])
def test_a_linear_that_is_zero_stays_zero_and_what_it_feeds_keeps_its_weights(tmp_path, method, reconstruct):
    folder = save("llama3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for leaf in ("self_attn.o_proj", "mlp.down_proj", "self_attn.v_proj"):
        tensors[f"model.layers.1.{leaf}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    amount = {"ratio": 0.5} if method in ("neurons", "heads") else {"sparsity": "0.5"}
    result = pruned(folder, tmp_path / "out", method=method, reconstruct=reconstruct, **amount)
    for leaf in ("self_attn.o_proj", "mlp.down_proj", "self_attn.v_proj"):
        assert not result.load(f"model.layers.1.{leaf}.weight").any()
    if method in ("wanda", "sparsegpt", "alps"):
        assert "inputs of 1 layer" in result.card.details["unseen"]
