"""Our own mix of types: the choice against all choices, its size against a written file, its KLs against
models that were changed by hand."""

import copy
import math
import textwrap

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.deployment.gguf_type_search import (
    NARROW,
    WIDE,
    FileLayout,
    TypeBudget,
    _choose,
    data_bytes,
    search_types,
)
from attar.deployment.settings import ExportSettings
from attar.errors import SettingsError
from attar.formats.gguf.container import GGUFTensorInfo, GGUFWriter
from attar.formats.gguf.quant_types import bits, tensor_bytes
from attar.formats.gguf.tensor_map import placements
from attar.formats.gguf.types import TYPES
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.quantization.grids import GGML
from attar.quantization.mixed_precision.search import with_falling
from attar.sensitivity.measurements import Measurement, read
from attar.sensitivity.weight_changes import load_inputs
from tests import tiny_models
from tests.formats.gguf import variants

WIDTHS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
TEXT = {"samples": 3, "sequence_length": 24, "batch_size": 2, "data": textwrap.__file__}
TEXT |= {"format": "gguf", "bits": 5.0}


class Case:
    """A tiny model on disk, and where its tensors stand."""

    def __init__(self, folder, family="llama2", model=None, **changes):
        model = model or tiny_models.build(family, **{**({} if family == "gpt2" else WIDTHS), **changes})
        self.checkpoint = open_checkpoint(tiny_models.save(model, folder / "model"))
        self.placed = placements(self.checkpoint.config, self.checkpoint.tensors)
        self.shapes = {one.gguf: one.file_shape for one in self.placed}
        self.settings = ExportSettings(**TEXT)

    def mix(self, **options):
        settings = options.pop("settings", self.settings)
        return search_types(self.checkpoint, self.placed, settings, **options)

    def measured(self):
        """KL by group and type, as the cached file has them."""
        on = load_inputs(self.checkpoint, self.settings)
        actual = {}
        for one in read(on.file, on.key):
            actual.setdefault(one.group, {})[one.option] = one
        return actual


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder for measurements; what else is cached (compiled kernels) stays where it is."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("attar.sensitivity.weight_changes.cache_folder", lambda: folder)
    return folder


def stored_of(case, module):
    """GGUF names of a module's tensors."""
    return [one.gguf for one in case.placed if one.stored == f"{module}.weight"]


def test_the_choice_is_the_best_of_all_and_keeps_its_budget(tmp_path):
    case = Case(tmp_path)
    previous = math.inf
    for budget in (3.1, 4.0, 5.5):
        mix = case.mix(bits=budget)
        assert mix.bits_per_weight == bits(mix.kinds, case.shapes)[0] <= budget
        assert list(mix.kinds) == list(case.shapes)
        groups = case.measured()
        falling = with_falling([row for options in groups.values() for row in options.values()])
        groups = {name: {r.option: r for r in falling if r.group == name} for name in groups}
        assert len(groups) == 6 and all(list(options) == list(WIDE) for options in groups.values())
        weights = sum(math.prod(shape) for shape in case.shapes.values())
        vectors = sum(4 * math.prod(shape) for shape in case.shapes.values() if len(shape) == 1)
        room = budget * weights / 8 - vectors
        loss, size = (
            torch.tensor(
                [[getattr(group[kind], what) for kind in WIDE] for group in groups.values()],
                dtype=torch.float64,
            )
            for what in ("kl", "bits")
        )
        every = torch.cartesian_prod(*[torch.arange(len(WIDE))] * len(groups))
        at = torch.arange(len(groups)), every
        best = float(loss[at].sum(1)[size[at].sum(1) <= 8 * room].min())
        ours = 0.0
        for group in groups.values():
            modules = next(iter(group.values())).modules
            kinds = {mix.kinds[name] for module in modules for name in stored_of(case, module)}
            assert len(kinds) == 1
            ours += group[kinds.pop()].kl
        assert ours == pytest.approx(best, rel=1e-9) and ours < previous and mix.report["gap"] == 0
        assert mix.report["predicted"] == pytest.approx(ours, rel=1e-9)
        previous = ours
    assert len({kind for kind in mix.kinds.values() if kind != "F32"}) > 1
    assert mix.report["curve"][0][0] < 3.1 < 8.5 < mix.report["curve"][-1][0] + 0.1


def kl_by_hand(case, kinds):
    """KL in float64 of a copy with modules in types; a tied head follows its embedding."""
    model = unstack(load_model(case.checkpoint, dtype=torch.float32))
    changed = copy.deepcopy(model)
    for name, kind in kinds.items():
        module = changed.get_submodule(name)
        weight = module.weight.data.T if type(module).__name__ == "Conv1D" else module.weight.data
        grid = GGML[kind]
        weight.copy_(grid.quantize(weight, grid.choose(weight)).dequantize())
    with torch.no_grad():
        batches = load_inputs(case.checkpoint, case.settings).batches
        p, q = (
            torch.cat([m(input_ids=batch).logits.flatten(0, 1) for batch in batches]).double().log_softmax(-1)
            for m in (model, changed)
        )
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama2", "smollm", "gemma3"])
def test_embedding_and_head_are_measured_like_a_model_changed_by_hand(tmp_path, family):
    case = Case(tmp_path, family, num_hidden_layers=2)
    mix = case.mix(bits=5.0)
    groups, tied = case.measured(), family != "llama2"
    assert ("lm_head" in groups) == (not tied) and ("output.weight" in case.shapes) == (not tied)
    assert next(iter(groups)) == "model.embed_tokens"
    for name in ("model.embed_tokens",) if tied else ("model.embed_tokens", "lm_head"):
        for kind in ("Q2_K", "Q4_K"):
            assert groups[name][kind].kl == pytest.approx(kl_by_hand(case, {name: kind}), rel=2e-3), name
            assert groups[name][kind].bits == 320 * TYPES[kind].size * 8
            assert 0 < groups[name][kind].output_error < 0.2
    chosen = {one.stored.removesuffix(".weight"): mix.kinds[one.gguf] for one in case.placed if one.matrix}
    assert mix.report["measured"] == pytest.approx(kl_by_hand(case, chosen), rel=2e-3)


@pytest.mark.slow
def test_the_size_is_that_of_the_written_file(tmp_path):
    case = Case(tmp_path)
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": [f"t{i}" for i in range(320)]}
    smallest = None
    for size in (400_000, 300_000):
        mix = case.mix(size=size, metadata=metadata)
        slots = [GGUFTensorInfo(name, kind, case.shapes[name]) for name, kind in mix.kinds.items()]
        whole = metadata | {"general.file_type": mix.file_type, "general.quantization_version": 2}
        with GGUFWriter(tmp_path / "model.gguf", whole, slots) as writer:
            for name, kind in mix.kinds.items():
                nbytes = tensor_bytes(kind, case.shapes[name])
                raw = torch.zeros(nbytes, dtype=torch.uint8)
                rows = case.shapes[name][:-1]
                writer.add(name, raw.view(torch.float32) if kind == "F32" else raw.view(*rows, -1))
            writer.finish()
        written = (tmp_path / "model.gguf").stat().st_size
        assert mix.size == written <= size
        assert written > 0.9 * size
        smallest = mix.size
    with pytest.raises(SettingsError, match=r"size is 9000, but must be at least (\d+) bytes") as caught:
        case.mix(size=9000, metadata=metadata)
    least = int(caught.value.allowed.split()[2])
    assert case.mix(size=least, metadata=metadata).size <= least < smallest
    with pytest.raises(SettingsError):
        case.mix(size=least - 1, metadata=metadata)


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_before_anything_is_measured(tmp_path, cache):
    case = Case(tmp_path)
    with pytest.raises(
        SettingsError, match=r"bits is 2\.0, but must be at least 2\.\d+: every tensor"
    ) as caught:
        case.mix(bits=2.0)
    assert not list(cache.iterdir())
    least = float(caught.value.allowed.split()[2].rstrip(":"))
    assert set(case.mix(bits=least).kinds.values()) == {"Q2_K", "F32"}


@pytest.mark.slow
def test_inputs_that_256_does_not_divide(tmp_path):
    case = Case(tmp_path, hidden_size=64, intermediate_size=96)
    mix = case.mix(bits=5.2)
    groups = case.measured()
    assert all(sorted(options) == sorted(NARROW) for options in groups.values())
    assert mix.bits_per_weight <= 5.2 and any("256 does not divide" in note for note in mix.notes)
    assert {TYPES[kind].block for kind in mix.kinds.values()} <= {1, 32}


@pytest.mark.slow
def test_inputs_that_32_does_not_divide_stay_numbers(tmp_path):
    case = Case(tmp_path, intermediate_size=80)
    mix = case.mix(bits=6.0)
    down = [kind for name, kind in mix.kinds.items() if "ffn_down" in name]
    assert down == ["F16"] and "1 tensors are F16" in mix.notes
    assert mix.bits_per_weight <= 6.0 and not any("down_proj" in group for group in case.measured())


def test_types_given_by_hand_are_kept_and_paid_for(tmp_path):
    case = Case(tmp_path)
    own = ExportSettings(**TEXT, overrides=("^output=Q8_0", "attn_(q|k)=Q6_K"))
    mix = case.mix(bits=5.5, settings=own)
    assert mix.kinds["output.weight"] == "Q8_0"
    assert mix.kinds["blk.0.attn_q.weight"] == mix.kinds["blk.0.attn_k.weight"] == "Q6_K"
    assert mix.bits_per_weight <= 5.5
    assert list(case.measured()) == [
        "model.embed_tokens",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
    ]


def test_a_type_that_one_tensor_of_a_group_cannot_have_is_no_candidate():
    shapes = {"k": (4, 128), "v": (4, 256), "w": (4, 512)}
    parts = FileLayout(shapes, {}, {"kv": ["k", "v"], "w": ["w"]}, {"kv": ["kv"], "w": ["w"]})
    assert parts.candidates("kv") == ("Q8_0",) and parts.candidates("w") == WIDE


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["granitemoe", "qwen3_moe"])  # stored in a stack, and one by one
def test_experts_of_a_layer_have_a_type_for_gate_and_up_and_one_for_down(variant, tmp_path):
    case = Case(tmp_path, model=variants.build(variant))
    mix = case.mix(bits=6.0)
    stacks = {name: kind for name, kind in mix.kinds.items() if "_exps." in name}
    assert {case.shapes[name][0] for name in stacks} == {4} and len(stacks) >= 3
    assert stacks["blk.0.ffn_gate_exps.weight"] == stacks["blk.0.ffn_up_exps.weight"]
    assert mix.bits_per_weight == bits(mix.kinds, case.shapes)[0] <= 6.0
    down = next(group for group in case.measured() if group.endswith("experts.down_proj"))
    row = case.measured()[down]["Q4_0"]
    assert len(row.modules) == 4 and row.bits == math.prod(case.shapes["blk.0.ffn_down_exps.weight"]) * 4.5
    wanted = kl_by_hand(case, dict.fromkeys(row.modules, "Q4_0"))
    assert row.kl == pytest.approx(wanted, rel=2e-3)


@pytest.mark.slow
def test_nothing_is_measured_twice_and_the_same_comes_out(tmp_path):
    case = Case(tmp_path)
    first = case.mix(bits=4.0)
    file = load_inputs(case.checkpoint, case.settings).file
    before = file.stat().st_mtime_ns
    assert case.mix(bits=4.0) == first
    case.mix(bits=6.0)
    assert file.stat().st_mtime_ns == before


@pytest.mark.slow
def test_tensors_of_one_parameter_share_a_type_and_both_are_paid_for(tmp_path):
    """A family whose file needs a copy of the tied embedding as its head."""
    case = Case(tmp_path, "gpt_neox", tie_word_embeddings=True)
    budget = 4.6
    mix = case.mix(bits=budget)
    assert mix.kinds["output.weight"] == mix.kinds["token_embd.weight"]
    assert mix.bits_per_weight <= budget and "lm_head" not in case.measured()
    assert mix.kinds["blk.0.attn_qkv.weight"] in WIDE


@pytest.mark.slow
def test_conv1d_and_positions(tmp_path):
    case = Case(tmp_path, "gpt2", n_embd=256, n_layer=1)
    mix = case.mix(bits=7.0)
    assert mix.kinds["position_embd.weight"] == "F32" and mix.kinds["blk.0.attn_qkv.weight"] in WIDE
    name = "transformer.h.0.mlp.c_proj"
    wanted = kl_by_hand(case, {name: "Q3_K"})
    assert case.measured()[name]["Q3_K"].kl == pytest.approx(wanted, rel=2e-3)


def layout():
    shapes = {"blk.0.a.weight": (4, 32), "blk.1.a.weight": (4, 32), "norm.weight": (33,)}
    tensors = {"0": ["blk.0.a.weight"], "1": ["blk.1.a.weight"]}
    return FileLayout(shapes, {"norm.weight": "F32"}, tensors, {"0": ["0"], "1": ["1"]})


def test_a_size_counts_what_fills_tensors_up_to_the_alignment_and_an_average_does_not():
    kinds = {"blk.0.a.weight": "Q4_0", "norm.weight": "F32"}
    plain, padded = 4 * 18 + 33 * 4, 96 + 160
    assert data_bytes(kinds, layout().shapes, padding=False) == plain
    assert data_bytes(kinds, layout().shapes) == padded
    assert TypeBudget(layout(), 0.0, 4096, 64).cost(kinds) == 8 * padded
    assert TypeBudget(layout(), 5.0, 0, 64).cost(kinds) == 8 * plain
    assert TypeBudget(layout(), 0.0, 4096, 64).left == 8 * (4096 - 160 - 64)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_type_whose_divergence_is_not_finite_is_not_chosen(kl):
    measured = {("0", "Q4_0"): 0.5, ("0", "Q8_0"): kl, ("1", "Q4_0"): 0.5, ("1", "Q8_0"): 0.1}
    rows = [
        Measurement(group, (group,), kind, kind, 0, 128, value, 0.0)
        for (group, kind), value in measured.items()
    ]
    chosen, curve = _choose(TypeBudget(layout(), 0.0, 4096, 64), rows)
    assert chosen.choice == {"0": "Q4_0", "1": "Q8_0"} and all(math.isfinite(loss) for _, loss in curve)
