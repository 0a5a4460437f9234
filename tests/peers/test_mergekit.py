"""Merges against mergekit itself, tensor by tensor, on three fine-tunes of attar:tiny.

The fine-tunes are a few AdamW steps on different parts of the standard library, saved in float32 as training
left them, or the folders of ``$ATTAR_SPECIALISTS`` (``benchmarks/specialists.py --train`` makes them). The
base is stored in bf16.

Equal means the same bits, but where a case says why it cannot be:

- ``tied``: entries whose |d| equals the last one kept. Only some of them are kept, and which ones an unstable
  sort of torch's decides in mergekit, the order in memory here.
- ``bound``: by how much an entry may be off, in units of the dtype's epsilon times the sum of |y|, |base| and
  the models' |x|.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import attar
from attar.checkpoint import open_checkpoint
from attar.models.loading.load import load_model, load_tokenizer, save_model
from attar.walks.objectives import next_token
from attar.walks.train import train
from tests.peers.mergekit_peer import (
    BENCHMARKS,
    MISSING,
    Case,
    case,
    configured,
    little,
    mergekit,
    one_thread,
    stored,
    write,
)

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.peers
if MISSING:
    pytest.skip("no $ATTAR_PEERS/mergekit", allow_module_level=True)
sys.path.append(str(BENCHMARKS))
import specialists  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHTS = {"one": 0.5, "two": 0.3, "three": 0.4}
ALL = ("one", "two", "three")
DENSITIES = {"one": 0.2, "two": 0.5, "three": 0.7}
TIES = tuple((name, density, 0.0) for name, density in DENSITIES.items())
CRUMBS = tuple((name, 0.7, 0.02) for name in ALL)
GRADIENTS = {
    "t": [
        {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
        {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
        {"value": 0.5},
    ]
}
STACKED = """
merge_method: passthrough
slices:
  - sources:
      - {model: ONE, layer_range: [0, 6]}
  - sources:
      - model: TWO
        layer_range: [2, 8]
        parameters:
          scale:
            - {filter: o_proj, value: 0.0}
            - {filter: down_proj, value: 0.5}
            - {value: 1.0}
"""
LAYERWISE = """
merge_method: ties
base_model: BASE
slices:
  - sources:
      - {model: BASE, layer_range: [0, 3]}
      - {model: ONE, layer_range: [0, 3], parameters: {weight: [1.0, 0.5]}}
      - {model: TWO, layer_range: [0, 3], parameters: {weight: 0.25}}
  - sources:
      - {model: BASE, layer_range: [3, 8]}
      - {model: TWO, layer_range: [3, 8], parameters: {weight: [{filter: mlp, value: 0.7}, {value: 0.2}]}}
      - {model: THREE, layer_range: [3, 8], parameters: {weight: [0.0, 0.3, 1.0]}}
parameters: {lambda: 0.8}
"""
CASES = {
    "linear": case("linear", *ALL, each={"weight": WEIGHTS}),
    "linear, sum": case("linear", *ALL, each={"weight": WEIGHTS}, shared={"normalize": False}),
    "slerp": case("slerp", "one", "two", base="ONE", shared={"t": 0.3}),
    "slerp, gradients": case("slerp", "one", "two", base="ONE", shared=GRADIENTS),
    "nuslerp": case("nuslerp", "one", "two", each={"weight": WEIGHTS}),
    "nuslerp, base": case("nuslerp", "one", "two", base="BASE", each={"weight": WEIGHTS}),
    "nuslerp, columns": case(
        "nuslerp", "one", "two", each={"weight": WEIGHTS}, shared={"nuslerp_flatten": False}
    ),
    "nuslerp, rows": case(
        "nuslerp",
        "one",
        "two",
        each={"weight": WEIGHTS},
        shared={"nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "multislerp": case("multislerp", *ALL, each={"weight": WEIGHTS}),
    "multislerp, base": case("multislerp", *ALL, base="BASE", each={"weight": WEIGHTS}),
    "karcher": case("karcher", *ALL),
    "task arithmetic": case("task_arithmetic", *ALL, base="BASE", each={"weight": WEIGHTS}),
    "task arithmetic, lambda": case(
        "task_arithmetic",
        *ALL,
        base="BASE",
        each={"weight": WEIGHTS},
        shared={"lambda": 0.9, "normalize": True},
    ),
    "ties": case("ties", *ALL, base="BASE", each={"weight": WEIGHTS, "density": DENSITIES}, tied=TIES),
    "ties, whole": case("ties", *ALL, base="BASE", each={"weight": WEIGHTS}),
    "ties, layers": Case(LAYERWISE),
    "breadcrumbs": case(
        "breadcrumbs", *ALL, base="BASE", each={"weight": WEIGHTS, "density": 0.7, "gamma": 0.02}, tied=CRUMBS
    ),
    "breadcrumbs, ties": case(
        "breadcrumbs_ties",
        *ALL,
        base="BASE",
        each={"weight": WEIGHTS, "density": 0.7, "gamma": 0.02},
        tied=CRUMBS,
    ),
    "breadcrumbs, rescaled": case(  # R is summed in float64 here, in float32 there: off by an eps or two
        "breadcrumbs",
        *ALL,
        base="BASE",
        each={"weight": WEIGHTS, "density": 0.7, "gamma": 0.02},
        shared={"rescale": True},
        tied=CRUMBS,
        float32=3.0,
    ),
    "model stock": case("model_stock", *ALL, base="BASE"),
    "model stock, rows": case("model_stock", *ALL, base="BASE", shared={"filter_wise": True}),
    "sce": case("sce", *ALL, base="BASE"),
    "sce, selected": case(  # other tied entries, other sums of squares, weights one rounding apart
        "sce", *ALL, base="BASE", shared={"select_topk": 0.3}, selected=0.3, bfloat16=1.0
    ),
    "nearswap": case("nearswap", "one", base="BASE", shared={"t": 0.001}),
    "arcee fusion": case("arcee_fusion", "one", base="BASE"),
    "ram": case("ram", *ALL, base="BASE"),
    "ram plus": case("ramplus_tl", *ALL, base="BASE"),
    "passthrough, stacked": Case(STACKED),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base and the fine-tunes by the names that stand in the YAML."""
    base = open_checkpoint("attar:tiny")
    actual = {"BASE": base.path}
    result = os.environ.get("ATTAR_SPECIALISTS")
    work = tmp_path_factory.mktemp("fine-tunes")
    tokenizer = load_tokenizer(base)
    settings = replace(specialists.settings_of(4), batch_size=2, evaluate_every=0, precision="fp32")
    for name, part in zip(ALL, specialists.PARTS, strict=True):
        if result:
            actual[name.upper()] = Path(result) / part
            continue
        model = load_model(base, dtype=torch.float32)
        train(model, next_token, specialists.rows_of(part, "calibration", tokenizer, 8)[:, :256], settings)
        actual[name.upper()] = write(model, work / name)
    return actual


def undecided(values, *edges):
    """Entries as large as the last one before an edge, where there is an equal one beyond it; an edge is a
    place in descending order."""
    ranked = values.flatten().float().sort(descending=True).values
    actual = torch.zeros_like(values, dtype=torch.bool)
    for edge in edges:
        if 0 < edge < len(ranked) and ranked[edge - 1] == ranked[edge]:
            actual |= values.float() == ranked[edge]
    return actual


def excused(chosen, base, tensors):
    """Entries whose fate an unstable sort decides; ``tensors`` by model, in the dtype of the merge."""
    actual = torch.zeros(base.shape, dtype=torch.bool)
    for model, density, gamma in chosen.tied:
        n = base.numel()
        top = int(gamma * n)
        actual |= undecided((tensors[model.upper()] - base).abs(), top, top + int(density * n))
    if chosen.selected < 1:
        variance = torch.stack([tensors[name.upper()] - base for name in ALL]).var(dim=0, unbiased=False)
        actual |= undecided(variance, int(int(variance.count_nonzero()) * chosen.selected))
    return actual


def compare(chosen, dtype, folders, line, out):
    """Merge with attar and compare with a finished run of mergekit."""
    kind = DTYPES[dtype]
    result = attar.merge(configured(chosen.text, dtype, folders), out).path
    ours, wanted = stored(result), stored(line["out"])
    assert sorted(ours) == sorted(wanted)
    inputs = {key: stored(folder) for key, folder in folders.items()}
    wrong, off = {}, 0.0
    for tensor, other in wanted.items():
        mine, other = ours[tensor], other.to(kind)  # two methods of mergekit's leave float32
        assert (mine.dtype, mine.shape) == (kind, other.shape), tensor
        differ = mine != other
        if not bool(differ.any()):
            continue
        read = {key: item[tensor].to(kind) for key, item in inputs.items() if tensor in item}
        differ &= ~excused(chosen, read["BASE"], read) if tensor in inputs["BASE"] else differ
        if bool(differ.any()):
            size = sum((item.abs().float() for item in read.values()), other.abs().float())
            far = ((mine.float() - other.float()).abs() / size)[differ].max() / torch.finfo(kind).eps
            wrong[tensor], off = int(differ.sum()), max(off, float(far))
    bound = getattr(chosen, dtype)
    assert off <= bound, f"{sum(wrong.values())} entries off by up to {off:.3g}: {list(wrong.items())[:3]}"


def ran(cases, folders, work):
    """mergekit's lines for every case in every dtype."""
    runs = []
    for number, chosen in enumerate(cases.values()):
        for dtype in DTYPES:
            file = work / f"{number}-{dtype}.yml"
            file.write_text(configured(chosen.text, dtype, folders))
            runs.append({"config": str(file), "out": str(file.with_suffix("")), "seed": 0})
    lines = iter(mergekit(runs))
    return {(name, dtype): next(lines) for name in cases for dtype in DTYPES}


@pytest.fixture(scope="module")
def theirs(folders, tmp_path_factory):
    return ran(CASES, folders, tmp_path_factory.mktemp("mergekit"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_deterministic_merge_has_mergekits_tensors(name, dtype, folders, theirs, tmp_path):
    line = theirs[name, dtype]
    if "error" in line:  # multislerp refuses task vectors that are 0 in bf16
        assert (name, dtype) == ("multislerp, base", "bfloat16"), line["error"]
        pytest.skip(f"mergekit: {line['error'].splitlines()[0]}")
    compare(CASES[name], dtype, folders, line, tmp_path / "out")


APART = {
    "slerp": case("slerp", "one", "two", base="ONE", shared={"t": 0.3}),
    "nuslerp": case("nuslerp", "one", "two", each={"weight": WEIGHTS}),
    "nuslerp, base": case("nuslerp", "one", "two", base="BASE", each={"weight": WEIGHTS}),
    "nuslerp, rows": case(
        "nuslerp",
        "one",
        "two",
        each={"weight": WEIGHTS},
        shared={"nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "multislerp": case("multislerp", *ALL, each={"weight": WEIGHTS}),
    "multislerp, base": case("multislerp", *ALL, base="BASE", each={"weight": WEIGHTS}),
    "karcher": case("karcher", *ALL),
    "model stock": case("model_stock", *ALL, base="BASE"),
}
"""Fine-tunes are nearly parallel; these models are not."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A base and three models whose directions differ much: random, with a common part."""
    work = tmp_path_factory.mktemp("apart")
    actual = {}
    for number, name in enumerate(("BASE", "ONE", "TWO", "THREE")):
        model = little()
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        actual[name] = write(model, work / name)
    return actual


@pytest.fixture(scope="module")
def theirs_apart(apart, tmp_path_factory):
    return ran(APART, apart, tmp_path_factory.mktemp("mergekit-apart"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", APART)
def test_models_in_different_directions_merge_as_in_mergekit(name, dtype, apart, theirs_apart, tmp_path):
    assert "error" not in theirs_apart[name, dtype], theirs_apart[name, dtype]
    compare(APART[name], dtype, apart, theirs_apart[name, dtype], tmp_path / "out")


def test_a_union_has_mergekits_tokens_and_rows(tmp_path):
    """One tokenizer has four tokens more than its model has rows, another two tokens with rows."""
    folders = {}
    for name, extra, rows in (("BASE", [], 64), ("ONE", ["<a>", "<b>"], 66), ("TWO", list("wxyz"), 64)):
        tokens = ["<unk>", *(f"t{number}" for number in range(1, 64))]
        tokenizer = Tokenizer(BPE(dict(zip(tokens, range(64), strict=True)), []))
        tokenizer.add_tokens(extra)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=rows))
        save_model(model, tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
        folders[name] = tmp_path / name
    text = case("linear", "BASE", "ONE", "TWO", base="BASE", each={"weight": 1.0}).text
    text = configured(f"{text}tokenizer_source: union\n", "float32", folders)
    (tmp_path / "merge.yml").write_text(text)
    (line,) = mergekit([{"config": str(tmp_path / "merge.yml"), "out": str(tmp_path / "theirs"), "seed": 0}])
    assert "error" not in line, line
    ours = attar.merge(text, tmp_path / "ours", tokens=0).path
    ids = AutoTokenizer.from_pretrained(ours).get_vocab()
    assert ids == AutoTokenizer.from_pretrained(tmp_path / "theirs").get_vocab() and len(ids) == 66
    mine, other = stored(ours), stored(tmp_path / "theirs")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert mine[name].shape == other[name].shape == (66, 16)
        torch.testing.assert_close(mine[name], other[name])
