"""The device runner: mixtures, layouts, padded shapes, operators of a step, answers beside the compiled
runner's. test_compiled.py has its other tests, which both runners pass."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attar.errors import MemoryNeededError, ModelError
from attar.kernels.device import planes
from attar.kernels.experts import MixtureWeights
from attar.kernels.packed import quantize
from attar.runtime.admission import Limits
from attar.runtime.kv.store.rotated import CacheBasis
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner import choice
from attar.runtime.runner.choice import RunnerSettings
from attar.runtime.runner.codes import PackedCodes
from attar.runtime.runner.device import graphs
from attar.runtime.runner.device.layout import DENSE, DeviceWeight, device_codes, stacked
from attar.runtime.runner.device.linears import product_kernel
from attar.runtime.runner.device.memory import planned_tokens
from attar.runtime.runner.device.model import on_device
from attar.runtime.runner.device.runner import KV_DTYPES, DevicePool, DeviceProgram, device_runner
from attar.runtime.runner.device.shared_expert import with_shared_expert
from attar.runtime.runner.device.step import StepShape, shape_of, stage, views
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_mixtures, tiny_models
from tests.marks import slow_but

CPU = torch.device("cpu")
DENSE_FAMILIES = ("llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss")
LENGTH = 40
CLOSE = {"rtol": 0, "atol": 2e-4}


def tokens(length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny_models.VOCABULARY, (length,), generator=generator).tolist()


def step(*parts, parents=None):
    """Of (sequence, ids, start, stop, blocks); logits of all tokens are wanted."""
    ids = [token for _, text, a, b, _ in parts for token in text[a:b]]
    spans = tuple(TokenSpan(n, a, b, tuple(blocks), b - a) for n, _, a, b, blocks in parts)
    return StepInput(ids, spans, (), parents)


def runner(model, **settings):
    given = {"blocks": 24, "kv_dtype": "float32", **settings}
    return device_runner(model.config, model.state_dict(), **given)


@pytest.mark.parametrize("family", slow_but(MIXTURES, "glm4_moe", "gpt_oss"))
def test_mixtures(family):
    """Against transformers: 1, 2, 32 and 5 tokens in a step."""
    model, ids = tiny_mixtures.build(family), tokens()
    actual, cuts = runner(model), [0, 1, 3, 35, LENGTH]
    rows = [actual.run(step((0, ids, a, b, [5, 2, 9]))) for a, b in itertools.pairwise(cuts)]
    wanted = tiny_models.logits(model, torch.tensor([ids]))[0]
    torch.testing.assert_close(torch.cat(rows), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("family", "weights"), [("qwen2_moe", "bf16"), pytest.param("mixtral", "int4", marks=pytest.mark.slow)]
)
def test_a_token_of_a_mixture_does_not_depend_on_its_batch(family, weights):
    model, ids, other = tiny_mixtures.build(family), tokens(), tokens(seed=7)
    alone, busy = (runner(model, weights=weights, group=16) for _ in range(2))
    wanted = torch.cat([alone.run(step((0, ids, at, at + 1, [5, 2, 9]))) for at in range(LENGTH)])
    first = busy.run(step((1, other, 0, 32, [0, 1]), (0, ids, 0, 33, [5, 2, 9])))[32:]
    second = busy.run(step((0, ids, 33, LENGTH, [5, 2, 9]), (1, other, 32, 33, [0, 1, 3])))[:-1]
    assert torch.equal(torch.cat([first, second]), wanted)


@pytest.mark.parametrize("family", slow_but(("qwen3", "gemma2"), "qwen3"))
def test_four_bit_keys_and_values_are_those_of_the_modules(family):
    """Of one layer, in which a code that rounds to its other neighbour changes no later one."""
    model, ids = tiny_models.build(family, num_hidden_layers=1, layer_types=None), tokens()
    plain = Modules(copy.deepcopy(model), blocks=24, kv_dtype="int4")
    drawn = torch.randn(plain.pool.store.basis.factors.shape, generator=torch.Generator().manual_seed(1))
    calibrated = CacheBasis(plain.pool.store.basis.centers, (drawn / 4).exp())
    for basis in (None, calibrated, dataclasses.replace(calibrated, formats=("int8",))):
        both = []
        for one in (
            Modules(copy.deepcopy(model), blocks=24, kv_dtype="int4", basis=basis),
            runner(model, kv_dtype="int4", basis=basis),
        ):
            parts = [one.run(step((0, ids, a, b, [5, 2, 9]))) for a, b in ((0, 33), (33, 34), (34, LENGTH))]
            both.append(torch.cat(parts))
        exact = runner(model).run(step((0, ids, 0, LENGTH, [5, 2, 9])))
        assert (both[1] - both[0]).norm() < 0.02 * (both[0] - exact).norm()


def codes(bits, rows=5, columns=96, zeros=False, kind="int8", seed=0):
    """Codes as a checkpoint of so many bits has them in lanes of 4 or 8."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    numbers[0, :2] = torch.tensor([0, 2**bits - 1])
    scales = torch.rand(rows, columns // 32, generator=generator).add(1).half().float()
    points = torch.randint(0, 2**bits, scales.shape, generator=generator).float() if zeros else None
    middle = 0 if zeros else {"int4": 8, "int8": 128}[kind] - 2 ** (bits - 1)
    return PackedCodes((numbers + middle).to(torch.uint8), scales, points, kind)


def value(weight):
    points = {"int4": 8.0, "int8": 128.0}[weight.kind] if weight.zeros is None else weight.zeros[..., None]
    parts = weight.codes.float().unflatten(1, (-1, weight.group))
    return ((parts - points) * weight.scales[..., None]).flatten(1)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_layout_keeps_every_number(bits, zeros):
    """In the bits that the grid had, whatever lanes they came in; scales and zero points in 16 bits or 8."""
    weight = codes(bits, zeros=zeros, kind="int4" if bits <= 4 else "int8")
    laid = device_codes(weight, None, CPU)
    assert (laid.bits, laid.rows, laid.columns, laid.scales.dtype) == (bits, 5, 96, torch.float16)
    assert (None if laid.zeros is None else laid.zeros.dtype) == (torch.uint8 if zeros else None)
    assert torch.equal(laid.dense(), value(weight))
    words = planes.cut(laid.data, bits).int() - weight.codes.int()
    assert len(words.unique()) == 1  # the codes, moved together


def test_experts_are_stacked_in_their_widest_codes():
    weights = [codes(3, seed=1), codes(5, seed=2), codes(4, zeros=True, kind="int4", seed=3)]
    laid = stacked([device_codes(weight, torch.ones(5) * n, CPU) for n, weight in enumerate(weights)])
    assert laid.bits == 5 and laid.bias[:, 0].tolist() == [0, 1, 2]
    assert torch.equal(laid.dense(), torch.stack([value(weight) for weight in weights]))


def mlp(weights, x):
    """A shared expert by itself, in float64; weights: gate_up and down, dense."""
    gate, up = (x @ weights[0].double().T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ weights[1].double().T


@pytest.mark.parametrize(
    ("bits", "of_shared", "zeros", "neurons", "parts"),
    [
        (DENSE, DENSE, False, 64, 2),
        (DENSE, DENSE, False, 48, 2),
        (4, 4, False, 64, 2),
        (4, 4, True, 32, 1),
        (4, 3, False, 96, 3),
        (8, 4, True, 64, 2),
        (4, 4, False, 32, 1),
        (4, 8, False, 64, 0),
        (4, DENSE, False, 64, 0),
    ],
)
def test_a_shared_expert_is_further_experts(bits, of_shared, zeros, neurons, parts):
    """The sum of what its parts compute; three experts of 32 neurons keep their values. Weights that would
    make theirs larger stay apart."""

    def linear(bits, rows, columns, seed, zeros=False):
        if bits == DENSE:
            return DeviceWeight(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))
        kind = "int4" if bits <= 4 else "int8"
        return device_codes(codes(bits, rows, columns, zeros=zeros, kind=kind, seed=seed), None, CPU)

    routed = [stacked([linear(bits, *shape, seed) for seed in range(3)]) for shape in ((64, 64), (64, 32))]
    shared = [linear(of_shared, *shape, 7, zeros) for shape in ((2 * neurons, 64), (64, neurons))]
    mixture = MixtureWeights(
        routing=None,
        router=None,
        gate_up=routed[0],
        down=routed[1],
        shared_gate_up=shared[0],
        shared_down=shared[1],
    )
    joined = with_shared_expert(mixture)
    assert len(joined.down.data) == 3 + parts and (joined.shared_down is None) is (parts > 0)
    dense = joined.gate_up.dense(), joined.down.dense()
    assert all(torch.equal(x[:3], weight.dense()) for x, weight in zip(dense, routed, strict=True))
    assert joined.down.bits == bits
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).double()
    if parts:
        found = sum(mlp(pair, x) for pair in zip(dense[0][3:], dense[1][3:], strict=True))
        torch.testing.assert_close(found, mlp([weight.dense() for weight in shared], x))


def test_inputs_that_do_not_fill_words_are_refused():
    with pytest.raises(ModelError, match="48 inputs do not fill words"):
        device_codes(PackedCodes(*quantize(torch.ones(2, 48), "int4", 16), None, "int4"), None, CPU)


def test_scales_that_sixteen_bits_do_not_hold_stay():
    weight = codes(4)
    weight.scales[0, 0] = 1 + 2**-20
    laid = device_codes(weight, None, CPU)
    assert laid.scales.dtype == torch.float32 and torch.equal(laid.dense(), value(weight))


@pytest.mark.parametrize("parents", [None, ((-1, 0, 0, 2), None)])
def test_room_for_more_changes_no_number(parents):
    """A step in the shape of a graph, as it is captured: further tokens, spans, blocks and rows."""
    model, ids, other = tiny_models.build("llama3"), tokens(), tokens(seed=3)
    parts = (0, ids, 10, 14, [5]), (1, other, 30, 31, [2, 8])
    logits = []
    for padded in (False, True):
        actual = runner(model)
        actual.run(step((0, ids, 0, 10, [5]), (1, other, 0, 30, [2, 8])))
        drafts = step(*parts, parents=parents)
        shape = graphs.bucket(shape_of(drafts)) if padded else shape_of(drafts)
        staged = stage(drafts, actual.block_size, shape, actual.capacity)
        logits.append(actual._program.run_numbers(staged, shape)[: drafts.wants])
        store = actual._program.pool.store.data
        logits.append(store[:, :, : actual.capacity])
    assert shape == StepShape(8, 9, 2, 8, 2 if parents else 0)
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])


def test_shapes_of_graphs():
    assert graphs.bucket(StepShape(1, 1, 1, 1)) == StepShape(1, 2, 1, 1)
    assert graphs.bucket(StepShape(33, 33, 9, 33, 1)) == StepShape(48, 49, 16, 48, 2)
    assert graphs.bucket(StepShape(257, 1, 1, 1)) is graphs.bucket(StepShape(70, 1, 9, 1, 3)) is None
    assert not graphs.wanted(CPU)


class ReplayedGraphs(graphs.StepGraphs):
    """Graphs of a device without any: a replay runs the step on the numbers that were copied."""

    def capture(self, staged, shape):
        numbers, logits = staged.clone(), self.run(staged, shape)
        graph = SimpleNamespace(replay=lambda: logits.copy_(self.run(numbers, shape)))
        event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
        return graphs.CapturedStep(graph, staged.clone(), numbers, logits, event)


def test_an_engine_on_graphs_answers_the_same():
    """Decode of one to three sequences, drafts and a chunk of a prompt, all in padded shapes; hidden states
    are captured anew."""
    model, texts = tiny_models.build("mistral"), []
    prompts = [tokens(9), tokens(20, seed=1), tokens(5, seed=2)]
    for replayed in (False, True):
        actual = runner(model, blocks=32)
        program = actual._program
        if replayed:
            program.graphs = ReplayedGraphs(program.run_numbers, CPU)
        llm = LLM.of(
            Loaded(actual, lookback=(actual.window, 0)), limits=Limits(step_tokens=16, sequences=4, chunk=8)
        )
        results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        texts.append([list(result.token_ids) for result in results])
    assert texts[0] == texts[1]
    assert len({shape.tokens for shape in program.graphs.captured}) > 1
    actual.keep_hidden([0])
    assert not program.graphs.captured


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"runner": "device"}, True),
        ({"runner": "modules"}, False),
        ({"runner": "compiled"}, False),
    ],
)
def test_a_gpu_takes_the_device_runner(settings, expected, monkeypatch):
    monkeypatch.setattr(choice, "pick_device", lambda name: torch.device(name))
    assert RunnerSettings(device="cuda", **settings).on_device is expected
    assert RunnerSettings(**settings).on_device is (settings.get("runner") == "device")


class Operators(TorchDispatchMode):
    """Counts what is dispatched: all that launches on a device."""

    FREE = (
        "view",
        "select",
        "slice",
        "unbind",
        "split",
        "detach",
        "alias",
        "as_strided",
        "unsqueeze",
        "empty",
    )

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name().partition("::")[2].partition(".")[0].strip("_")
        if not name.startswith(self.FREE):
            self.names[name] += 1
        return function(*arguments, **(keywords or {}))


def operators(actual, batch):
    """Of a step of so many sequences, on meta."""
    table = range(actual.capacity)
    spans = tuple(TokenSpan(n, 3, 4, (table[n],), 1) for n in range(batch))
    decode = StepInput([1] * batch, spans)
    shape = shape_of(decode)
    numbers = stage(decode, actual.block_size, shape, actual.capacity)
    program = on_meta(actual)
    with Operators() as counted, torch.no_grad():
        program.run_numbers(numbers.to("meta"), shape)
    return counted.names


def on_meta(actual):
    """The same program without data."""
    meta = torch.device("meta")
    again = actual.of(on_device(actual.weights, CPU), actual.capacity)
    pool, weights = again._program.pool, _to_meta(actual.weights)
    pool.store.planes = tuple(plane.to(meta) for plane in pool.store.planes)
    for name in ("data", "codes", "scales"):
        if hasattr(pool.store, name):
            setattr(pool.store, name, getattr(pool.store, name).to(meta))
    return DeviceProgram(weights, DevicePool(pool.store, meta), actual.dtype)


def _to_meta(weights):
    if isinstance(weights, torch.Tensor):
        return weights.to("meta")
    if isinstance(weights, tuple):
        return tuple(map(_to_meta, weights))
    if isinstance(weights, DeviceWeight) or dataclasses.is_dataclass(weights):
        names = [field.name for field in dataclasses.fields(weights)]
        return dataclasses.replace(weights, **{name: _to_meta(getattr(weights, name)) for name in names})
    return weights


@pytest.mark.parametrize(
    ("family", "most"),
    [*dict.fromkeys(DENSE_FAMILIES, 9).items(), *dict.fromkeys(MIXTURES, 10).items()],
)
def test_operators_of_a_layer(family, most):
    """Of every family of the step: what the same layers once more add, as many at a batch of 64 as at 1."""
    build = tiny_mixtures.build if family in MIXTURES else tiny_models.build
    actual = runner(build(family), blocks=70)
    layers = actual.weights.layers
    twice = actual.of(dataclasses.replace(actual.weights, layers=layers * 2), actual.capacity)
    one, many = operators(twice, 1), operators(twice, 64)
    assert one == many
    added = one - operators(actual, 1)
    assert sum(added.values()) <= most * len(layers), added


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_step_on_meta_reads_nothing(kv_dtype):
    """No value on the host, no mix of devices: with a tree, a chunk, hidden states and codes."""
    model = tiny_models.build("gemma2")
    actual = runner(model, kv_dtype=kv_dtype, weights="int4")
    program, ids = on_meta(actual), tokens()
    hidden = actual.keep_hidden([0, len(actual.weights.layers)])
    hidden.states = hidden.states.to("meta")
    program.pool.hidden = hidden
    parts = (0, ids, 18, 23, [0, 1]), (1, ids, 0, 20, [2, 3])
    mixed = step(*parts, parents=((-1, 0, 1, 0, 3), None))
    with torch.no_grad():
        logits = program.run(mixed)
    assert (logits.shape, logits.device.type) == ((25, tiny_models.VOCABULARY), "meta")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_a_step_is_traced_without_a_break(family):
    build = tiny_models.build if family == "llama3" else tiny_mixtures.build
    actual, ids = runner(build(family), weights="int4"), tokens()
    actual.run(step((0, ids, 0, 20, [0, 1])))
    decode = step((0, ids, 20, 21, [0, 1]))
    shape = shape_of(decode)
    numbers = stage(decode, actual.block_size, shape, actual.capacity)
    run = actual._program.run_numbers
    with torch.no_grad():
        wanted = run(numbers, shape)
        traced = torch.compile(run, fullgraph=True, backend="aot_eager")(numbers, shape)
    assert torch.equal(traced, wanted)


def test_kernels_are_chosen_by_bits_and_capability():
    assert product_kernel(4, None, triton=True) == "torch"
    assert (
        product_kernel(DENSE, (9, 0), triton=False) == product_kernel(DENSE, (7, 5), triton=True) == "cublas"
    )
    assert product_kernel(3, (9, 0), triton=True) == product_kernel(DENSE, (8, 0), triton=True) == "triton"
    assert product_kernel(3, (9, 0), triton=False) == product_kernel(3, (7, 5), triton=True) == "torch"


def test_the_cache_takes_what_is_left():
    assert planned_tokens("m", 1000, 10_000_000, most=None) == 9000
    assert planned_tokens("m", 1000, 10_000_000, most=500) == 500
    assert planned_tokens("m", 1000, 10_000_000, most=500, wanted=800) == 800
    with pytest.raises(MemoryNeededError, match=r"9,001 tokens needs 9.* and 9.* are left by the weights"):
        planned_tokens("m", 1000, 10_000_000, most=None, wanted=9001)


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True, n=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("weights", [None, "int4", "int8"])
def test_answers_are_those_of_the_compiled_runner(params, weights):
    """Prompts in chunks, prefixes, forks and a small pool; drafts of suffix trees change nothing."""
    prompts = ["def add(a, b):", "def add(a, c):\n    return", "The"]
    limits = Limits(step_tokens=32, sequences=4, chunk=10)
    made = [  # the compiled runner's own choice of activations depends on the processor
        LLM("attar:tiny", runner="compiled", weights=weights, activations=16, kv_tokens=256, limits=limits),
        LLM("attar:tiny", runner="device", weights=weights, kv_tokens=256, limits=limits),
    ]
    made.append(LLM("attar:tiny", runner="device", weights=weights, kv_tokens=256, speculate="suffix"))
    texts = [
        [[list(s.token_ids) for s in result.samples] for result in llm.generate(prompts, PARAMS[params])]
        for llm in made
    ]
    assert texts[0] == texts[1] == texts[2]
    assert made[1].describe().weights.endswith(" by torch")


def test_what_the_device_runner_does_not_run():
    with pytest.raises(ModelError, match="the device runner cannot run it: kv_dtype is kivi4"):
        LLM("attar:tiny", runner="device", kv_dtype="kivi4", block_size=32)


def test_numbers_of_a_step():
    """A chain and a tree, read back from the staged tensor."""
    ids = tokens()
    mixed = step((0, ids, 18, 22, [3, 7]), (1, ids, 5, 7, [9]), parents=((-1, 0, 0, 2), None))
    shape = StepShape(8, 3, 2, 7, 2)
    numbers = views(stage(mixed, 16, shape, 20), shape)
    assert numbers.ids.tolist() == [*ids[18:22], *ids[5:7], 0, 0]
    assert numbers.positions.tolist() == [18, 19, 19, 20, 5, 6, 0, 0]
    assert numbers.slots.tolist() == [114, 115, 116, 117, 149, 150, 320, 320]
    assert numbers.spans.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert numbers.lengths.tolist() == [18, 18, 18, 18, 6, 7, 1, 1]
    assert numbers.firsts.tolist() == [0, 0, 0, 0, 4, 4, 0, 0]
    assert numbers.tables.tolist() == [[3, 7], [9, 20], [20, 20]]
    assert numbers.tree[:, 0].tolist() == [0b1, 0b11, 0b101, 0b1101, 0, 0, 0, 0]
    assert numbers.rows.tolist() == [0, 1, 2, 3, 4, 5, 0]
