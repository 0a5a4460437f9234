"""Sensitivities against whole models that were changed and run by hand, and the file that keeps them."""

import copy
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from attar.errors import CheckpointError, DataError, ModelError, SettingsError
from attar.models.anatomy.discover import discover
from attar.quantization.grids import IntGrid
from attar.quantization.grids.scales import choose_scales
from attar.quantization.methods.rtn import rtn
from attar.quantization.mixed_precision import sensitivity
from attar.quantization.mixed_precision.search import integer_candidates, interaction, mix, with_falling
from attar.quantization.mixed_precision.sensitivity import falling, measure
from attar.sensitivity.measurements import Measurement, SensitivityKey, read
from attar.sensitivity.weight_changes import shared_groups
from tests import tiny_models

KEY = SensitivityKey("fingerprint", "text", 64, 16, 0)
CANDIDATES = {
    name: make for name, make in integer_candidates(32).items() if name in ("W2A16", "W4A16", "W8A16")
}


class Case:
    """A tiny model of a family, its groups, its blocks and some text."""

    def __init__(self, family="llama3", layers=2, **changes):
        self.model = tiny_models.build(family, num_hidden_layers=layers, **changes)
        anatomy = discover(self.model)
        self.blocks = [block.name for block in anatomy.blocks]
        self.linears = [name for block in anatomy.blocks for name in block.linears]
        self.groups = shared_groups(anatomy.blocks, self.linears)
        self.batches = list(tiny_models.tokens(self.model, batch=4, length=16).split(2))
        self.shapes = {name: self.shape(name) for name in self.linears}

    def shape(self, name):
        module = self.model.get_submodule(name)
        rows, columns = (
            module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
        )
        return int(rows), int(columns)

    def measure(self, file, candidates=CANDIDATES, **options):
        options = {"key": KEY, "blocks": self.blocks, **options}
        return measure(self.model, self.groups, candidates, self.batches, file, **options)

    def kl_by_hand(self, grids):
        """KL in float64 of a copy with these Linears on these grids."""
        changed = copy.deepcopy(self.model)
        for name, grid in grids.items():
            module = changed.get_submodule(name)
            turned = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.T
            turned.copy_(rtn(turned, grid, choose_scales(turned, grid, how="mse")).dequantize())
        with torch.no_grad():
            p, q = (
                torch.cat([m(input_ids=batch).logits for batch in self.batches]).double().log_softmax(-1)
                for m in (self.model, changed)
            )
        return float((p.exp() * (p - q)).sum(-1).mean())


def bytes_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "opt", "gemma2", "phi3", "bert"])
def test_every_number_is_that_of_a_model_changed_by_hand(tmp_path, family):
    case = Case(family)
    before = bytes_of(case.model)
    measured = case.measure(tmp_path / "s.json", {"W3A16": lambda storage: IntGrid(3, 32, storage=storage)})
    assert [(one.group, list(one.modules)) for one in measured] == [*case.groups.items()]
    for one in measured:
        grid = IntGrid(3, 32)
        assert one.kl == pytest.approx(case.kl_by_hand(dict.fromkeys(one.modules, grid)), rel=1e-4), one.group
        sizes = [case.shapes[name] for name in one.modules]
        assert one.weights == sum(n * k for n, k in sizes)
        assert one.bits == sum(n * k * 3 + n * math.ceil(k / 32) * 32 for n, k in sizes)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert not (tmp_path / ".s.json.work").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma3", "gpt_neox"])
def test_starting_at_the_block_gives_the_same_numbers_as_running_everything(tmp_path, family):
    case = Case(family, layers=3)
    candidates = {"W3A16": lambda storage: IntGrid(3, 32, storage=storage)}
    ran = []
    case.model.get_submodule(case.linears[0]).register_forward_pre_hook(lambda *_: ran.append(len(ran)))
    from_block = case.measure(tmp_path / "a.json", candidates)
    first = len(ran)
    whole = case.measure(tmp_path / "b.json", candidates, blocks=())
    second = len(ran) - first
    assert from_block == whole == case.measure(tmp_path / "c.json", candidates, memory=0)
    assert first < 0.5 * second  # of three blocks, the first one runs for its own groups alone


@pytest.fixture(scope="module")
def measured_case(tmp_path_factory):
    """A case, and what is measured of it: for tests that leave the model as it is."""
    case = Case()
    return case, case.measure(tmp_path_factory.mktemp("measured") / "s.json")


def test_output_error_is_that_of_the_inputs_the_layer_gets(measured_case):
    case, measured = measured_case
    actual = {one.group: one for one in measured}
    group = next(name for name in case.groups if name.startswith("model.layers.1") and "gate" in name)
    inputs = []
    hook = case.model.get_submodule(case.groups[group][0]).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].flatten(0, 1).double())
    )
    with torch.no_grad():
        for batch in case.batches:
            case.model(input_ids=batch)
    hook.remove()
    lost = whole = 0.0
    for name in case.groups[group]:
        W, grid = case.model.get_submodule(name).weight.data, IntGrid(8, 32)
        E = (W - rtn(W, grid, choose_scales(W, grid, how="mse")).dequantize()).double()
        lost += sum(float((x @ E.T).square().sum()) for x in inputs)
        whole += sum(float((x @ W.double().T).square().sum()) for x in inputs)
    assert actual[group].output_error == pytest.approx(lost / whole, rel=1e-4)


def counting(limit=10**9):
    """A rounding that counts its calls and dies at the limit."""
    calls = []

    def nearest_mse(module, weight, grid):
        if len(calls) >= limit:
            raise KeyboardInterrupt
        calls.append(grid)
        return sensitivity.nearest_mse(module, weight, grid)

    return calls, nearest_mse


def test_a_killed_run_goes_on_behind_its_last_measurement(tmp_path):
    case = Case()
    before = bytes_of(case.model)
    whole = case.measure(tmp_path / "whole.json")
    calls, dying = counting(limit=17)
    with pytest.raises(KeyboardInterrupt):
        case.measure(tmp_path / "cut.json", rounding=dying)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    kept = len(read(tmp_path / "cut.json"))
    assert 0 < kept < len(whole)
    calls, rounding = counting()
    assert case.measure(tmp_path / "cut.json", rounding=rounding) == whole
    done = [one for one in whole if one in read(tmp_path / "cut.json")[:kept]]
    assert len(calls) == 3 * len(case.linears) - sum(len(one.modules) for one in done)
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_only_what_is_missing_is_measured(tmp_path):
    case, file = Case(), tmp_path / "s.json"
    first = case.measure(file)
    calls, rounding = counting()
    assert case.measure(file, rounding=rounding) == first and calls == []
    more = {"W3A16": lambda storage: IntGrid(3, 32, storage=storage)}
    measured = case.measure(file, {**CANDIDATES, **more}, rounding=rounding)
    assert {grid.bits for grid in calls} == {3} and len(calls) == len(case.linears)
    assert [one for one in measured if one.option != "W3A16"] == first
    calls.clear()
    other = {"W4A16": lambda storage: IntGrid(4, 64, storage=storage)}  # another grid under the old name
    changed = case.measure(file, other, rounding=rounding)
    assert len(calls) == len(case.linears)
    assert all(one.bits < old.bits for one, old in zip(changed, first[1::3], strict=True))
    assert len(read(file)) == len(case.groups) * 5


def test_a_file_about_something_else_is_refused(tmp_path):
    case, file = Case(), tmp_path / "s.json"
    case.measure(file, {"W8A16": CANDIDATES["W8A16"]})
    with pytest.raises(ModelError, match="another model, seed"):
        case.measure(file, key=SensitivityKey("other", "text", 64, 16, 1))
    assert SensitivityKey("other", "text", 64, 16, 1).file_name() != KEY.file_name()
    content = json.loads(file.read_text())
    del content["measurements"][0]["bits"]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"incomplete.*bits"):
        read(file)
    file.write_text('{"format": "else"}')
    with pytest.raises(CheckpointError, match="not a file of sensitivities"):
        read(file)
    with pytest.raises(DataError):
        measure(case.model, case.groups, CANDIDATES, [], file, key=KEY)


@pytest.mark.slow
def test_a_grid_that_does_not_fit_is_left_out(tmp_path):
    case = Case()
    fits = lambda grid, shape: grid.bits != 2 or shape[1] % 96  # noqa: E731
    measured = case.measure(tmp_path / "s.json", fits=fits)
    assert {one.option for one in measured if "down_proj" in one.group} == {"W4A16", "W8A16"}
    assert len({one.option for one in measured if "down_proj" not in one.group}) == 3


@pytest.mark.slow
def test_a_grid_that_breaks_the_model_is_infinite_and_never_chosen(tmp_path):
    case, file = Case(), tmp_path / "s.json"

    def breaking(module, weight, grid):
        result = sensitivity.nearest_mse(module, weight, grid)
        if grid.bits == 2:
            result.parameters.scale.fill_(math.nan)
        return result

    measured = case.measure(file, rounding=breaking)
    assert all(math.isinf(one.kl) == (one.option == "W2A16") for one in measured)
    assert read(file) == sorted(measured, key=lambda one: read(file).index(one))
    assert "W2A16" not in mix(measured, case.shapes, 6.0).schemes.values()


class Talking(nn.Module):
    """Blocks that speak to each other behind the model's back: the last needs what the first one left."""

    class Block(nn.Module):
        def __init__(self, size, board, row):
            super().__init__()
            self.linear, self.board, self.place = nn.Linear(size, size, bias=False), board, row

        def forward(self, x):
            if self.place == 0:
                self.board["said"] = x.flip(-1)
            return x + torch.tanh(self.linear(x + self.board["said"]))

    def __init__(self):
        super().__init__()
        board = {}
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Talking.Block(16, board, index) for index in range(3))
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return type("Output", (), {"logits": self.head(x)})()


def test_a_model_whose_blocks_share_more_than_hidden_states_is_run_whole(tmp_path):
    torch.manual_seed(0)
    model = Talking().eval()
    groups = {f"b{i}": [f"blocks.{i}.linear"] for i in range(3)} | {"head": ["head"]}
    batches = list(torch.randint(0, 50, (4, 8)).split(2))
    candidates = {"W3": lambda storage: IntGrid(3, 0, storage=storage)}
    runs = [
        measure(model, groups, candidates, batches, tmp_path / f"{len(blocks)}.json", key=KEY, blocks=blocks)
        for blocks in ([], [f"blocks.{i}" for i in range(3)])
    ]
    assert runs[0] == runs[1]
    assert all(one.kl > 0 for one in runs[0])


def test_groups_share_what_runtimes_fuse():
    leaves = lambda case: [group.removeprefix(f"{case.blocks[0]}.") for group in case.groups][:4]  # noqa: E731
    assert leaves(Case("llama3")) == [
        "self_attn.q_proj+k_proj+v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj+up_proj",
        "mlp.down_proj",
    ]
    assert leaves(Case("gpt2")) == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert leaves(Case("phi3")) == [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    ]
    case = Case("llama3")
    fewer = [name for name in case.linears if "k_proj" not in name]
    groups = shared_groups(discover(case.model).blocks, fewer)
    assert list(itertools.chain(*groups.values())) == fewer
    assert "model.layers.0.self_attn.q_proj+v_proj" in groups
    apart = shared_groups(discover(case.model).blocks, fewer, qkv=False)
    assert list(itertools.chain(*apart.values())) == fewer and "model.layers.0.self_attn.v_proj" in apart


def test_the_mix_is_the_best_of_all_and_keeps_its_budget(tmp_path):
    case = Case()
    measured = case.measure(tmp_path / "s.json")
    weights = sum(n * k for n, k in case.shapes.values())
    options = {}
    for one in measured:
        options.setdefault(one.group, []).append(one)
    previous = math.inf
    for budget in (3.2, 4.25, 5.3, 6.0):
        chosen = mix(measured, case.shapes, budget)
        fitting = [
            math.fsum(one.kl for one in picked)
            for picked in itertools.product(*options.values())
            if sum(one.bits for one in picked) <= budget * weights
        ]
        assert chosen.kl == pytest.approx(min(fitting), rel=1e-9) and chosen.kl <= previous
        assert chosen.bits_per_weight <= budget and chosen.gap <= 1e-9 * chosen.kl
        assert list(chosen.schemes) == list(case.shapes)
        by_name = {(one.group, one.option): one for one in measured}
        total = sum(by_name[group, chosen.schemes[names[0]]].bits for group, names in case.groups.items())
        assert total == chosen.bits
        assert all(len({chosen.schemes[name] for name in names}) == 1 for names in case.groups.values())
        previous = chosen.kl
    assert chosen.curve[0][0] == pytest.approx(3.0) and chosen.curve[-1][0] == pytest.approx(9.0)


def test_what_cannot_be_assigned_is_refused(measured_case):
    case, measured = measured_case
    with pytest.raises(SettingsError, match=r"bits is 2.5, but must be at least 3, scales included"):
        mix(measured, case.shapes, 2.5)
    with pytest.raises(ModelError, match="lm_head was not measured"):
        mix(measured, {**case.shapes, "lm_head": (8, 8)}, 5.0)
    twice = [*measured, *(replace(one, group="again") for one in measured[:3])]
    with pytest.raises(ModelError, match="is in the groups"):
        mix(twice, case.shapes, 5.0)


def test_interaction_measures_the_whole_mix(measured_case, tmp_path):
    case, measured = measured_case
    chosen = mix(measured, case.shapes, 4.5)
    before = bytes_of(case.model)
    seen = interaction(case.model, chosen.schemes, chosen.kl, CANDIDATES, case.batches, tmp_path / "work")
    grids = {name: IntGrid(int(scheme[1]), 32) for name, scheme in chosen.schemes.items()}
    assert seen.predicted == chosen.kl
    assert seen.measured == pytest.approx(case.kl_by_hand(grids), rel=1e-4)
    assert 0.3 < seen.ratio < 3.0
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())


@pytest.mark.slow
def test_bf16_weights_and_arithmetic(tmp_path):
    case = Case()
    case.model.to(torch.bfloat16)
    key = SensitivityKey("fingerprint", "text", 64, 16, 0, "bf16")
    measured = case.measure(tmp_path / "s.json", key=key)
    assert all("torch.bfloat16" in one.definition for one in measured)
    assert all(0 <= one.kl < math.inf for one in measured)
    case.model.float()
    exact = case.measure(tmp_path / "x.json", dtype=torch.bfloat16)
    coarse = [(a.kl, b.kl) for a, b in zip(measured, exact, strict=True) if a.option == "W2A16"]
    assert all(a == pytest.approx(b, rel=0.2) for a, b in coarse)


def test_a_loss_falls_at_least_as_fast_as_the_output_error():
    """In proportion in a dense model; a loss that falls with the root, as changed choices of experts make it,
    counts by the largest error."""
    dense, rooted = [(0.4, 0.1), (0.1, 0.025)], [(0.4, 0.1), (0.2, 0.025)]
    assert [falling(*point, dense) for point in dense] == pytest.approx([0.4, 0.1])
    assert [falling(*point, rooted) for point in rooted] == pytest.approx([0.4, 0.1])
    assert falling(0.05, 0.025, dense) == 0.05  # faster is as measured
    assert falling(0.1, 0.0, [(0.4, 0.0)]) == 0.1 and falling(math.inf, math.inf, dense) == math.inf
    blank = Measurement("g", ("m",), "W4A16", "", 4, 1, 0.2, 0.025)
    rows = [replace(blank, option="W2A16", kl=0.4, output_error=0.1), blank, replace(blank, group="h")]
    assert [row.kl for row in with_falling(rows)] == pytest.approx([0.4, 0.1, 0.2])
