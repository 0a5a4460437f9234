"""Merges against mergekit itself, tensor by tensor, on three fine-tunes of attar:tiny.

``$ATTAR_PEERS/mergekit`` is an environment with it (``benchmarks/peers/environments.py mergekit`` builds it).
The fine-tunes are a few AdamW steps on different parts of the standard library, saved in float32 as training
left them, or the folders of ``$ATTAR_SPECIALISTS`` (``benchmarks/specialists.py --train`` makes them). The
base is stored in bf16. Everything runs on one thread, as the order of a sum depends on the number of threads.

Equal means the same bits, but where a case says why it cannot be:

- ``tied``: entries whose |d| equals the last one kept. Only some of them are kept, and which ones an unstable
  sort of torch's decides in mergekit, the order in memory here.
- ``bound``: by how much an entry may be off, in units of the dtype's epsilon times the sum of |y|, |base| and
  the models' |x|.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import attar
from attar.checkpoint import open_checkpoint
from attar.checkpoint.companions import copy_companions
from attar.models.load import load_model, load_tokenizer, save_model
from attar.walks.objectives import next_token
from attar.walks.train import train

pytestmark = pytest.mark.peers
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "mergekit" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no $ATTAR_PEERS/mergekit", allow_module_level=True)
sys.path.append(str(BENCHMARKS))
import specialists  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS = {"one": 0.5, "two": 0.3, "three": 0.4}


@dataclass(frozen=True)
class Case:
    """A configuration, and how far apart the two may be.

    Attributes:
        text: YAML without dtype; ONE, TWO, THREE and BASE stand for folders.
        tied: (model, density, gamma) of the trimmings that may decide ties differently.
        selected: the same for the share of the variances.
        float32: bound in float32; 0: the same bits.
        bfloat16: bound in bf16.
    """

    text: str
    tied: tuple[tuple[str, float, float], ...] = ()
    selected: float = 1.0
    float32: float = 0.0
    bfloat16: float = 0.0


def listed(*names, **parameters):
    """``models:`` of YAML; a parameter is one value for all, or one for each."""
    each = []
    for name in names:
        mine = {k: v[name] if isinstance(v, dict) else v for k, v in parameters.items()}
        each.append({"model": name.upper(), **({"parameters": mine} if mine else {})})
    return each


def case(method, *names, base=None, each=None, shared=None, **bounds):
    """A case from its parts."""
    config = {"merge_method": method, "models": listed(*names, **(each or {}))}
    config |= {"base_model": base} if base else {}
    config |= {"parameters": shared} if shared else {}
    return Case(yaml.safe_dump(config, sort_keys=False), **bounds)


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
    "karcher": case("karcher", *ALL, bfloat16=0.5),  # one rounding
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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base and the fine-tunes by the names that stand in the YAML."""
    base = open_checkpoint("attar:tiny")
    found = {"BASE": base.path}
    made = os.environ.get("ATTAR_SPECIALISTS")
    work = tmp_path_factory.mktemp("fine-tunes")
    tokenizer = load_tokenizer(base)
    settings = replace(specialists.settings_of(4), batch_size=2, evaluate_every=0, precision="fp32")
    for name, part in zip(ALL, specialists.PARTS, strict=True):
        if made:
            found[name.upper()] = Path(made) / part
            continue
        model = load_model(base, dtype=torch.float32)
        train(model, next_token, specialists.rows_of(part, "calibration", tokenizer, 8)[:, :256], settings)
        save_model(model, work / name)
        copy_companions(base.path, work / name)
        found[name.upper()] = work / name
    return found


def mergekit(runs):
    """Merge with mergekit, all in one process of one thread; its lines."""
    command = [PYTHON, BENCHMARKS / "peers" / "mergekit_run.py", "-"]
    ended = subprocess.run(
        [*map(str, command)],
        input=json.dumps({"runs": runs}),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def configured(text, dtype, folders):
    """The YAML of a case."""
    for name, folder in folders.items():
        text = text.replace(name, str(folder))
    return f"dtype: {dtype}\n{text}"


@pytest.fixture(scope="module")
def theirs(folders, tmp_path_factory):
    """mergekit's tensors of every case and dtype, loaded when asked for; an error's text where it failed."""
    work = tmp_path_factory.mktemp("mergekit")
    runs = []
    for number, name in enumerate(CASES):
        for dtype in DTYPES:
            file = work / f"{number}-{dtype}.yml"
            file.write_text(configured(CASES[name].text, dtype, folders))
            runs.append({"config": str(file), "out": str(file.with_suffix("")), "seed": 0})
    lines = iter(mergekit(runs))
    return {(name, dtype): next(lines) for name in CASES for dtype in DTYPES}


def stored(folder):
    """All tensors of a checkpoint by name."""
    return {
        name: tensor
        for file in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def undecided(values, *edges):
    """Entries as large as the last one before an edge, where there is an equal one beyond it; an edge is a
    place in descending order."""
    ranked = values.flatten().float().sort(descending=True).values
    found = torch.zeros_like(values, dtype=torch.bool)
    for edge in edges:
        if 0 < edge < len(ranked) and ranked[edge - 1] == ranked[edge]:
            found |= values.float() == ranked[edge]
    return found


def excused(chosen, base, tensors):
    """Entries whose fate an unstable sort decides; ``tensors`` by model, in the dtype of the merge."""
    found = torch.zeros(base.shape, dtype=torch.bool)
    for model, density, gamma in chosen.tied:
        n = base.numel()
        top = int(gamma * n)
        found |= undecided((tensors[model.upper()] - base).abs(), top, top + int(density * n))
    if chosen.selected < 1:
        variance = torch.stack([tensors[name.upper()] - base for name in ALL]).var(dim=0, unbiased=False)
        found |= undecided(variance, int(int(variance.count_nonzero()) * chosen.selected))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_deterministic_merge_has_mergekits_tensors(name, dtype, folders, theirs, tmp_path):
    line = theirs[name, dtype]
    if "error" in line:
        pytest.skip(f"mergekit: {line['error']}")
    kind, chosen = DTYPES[dtype], CASES[name]
    out = attar.merge(configured(chosen.text, dtype, folders), tmp_path / "out").path
    ours, wanted = stored(out), stored(line["out"])
    assert sorted(ours) == sorted(wanted)
    inputs = {key: stored(folder) for key, folder in folders.items()}
    wrong, off = {}, 0.0
    for tensor, other in wanted.items():
        mine, other = ours[tensor], other.to(kind)  # two methods of mergekit's leave float32
        assert (mine.dtype, mine.shape) == (kind, other.shape), tensor
        differ = mine != other
        if not bool(differ.any()):
            continue
        read = {key: each[tensor].to(kind) for key, each in inputs.items() if tensor in each}
        differ &= ~excused(chosen, read["BASE"], read) if tensor in inputs["BASE"] else differ
        if bool(differ.any()):
            size = sum((each.abs().float() for each in read.values()), other.abs().float())
            far = ((mine.float() - other.float()).abs() / size)[differ].max() / torch.finfo(kind).eps
            wrong[tensor], off = int(differ.sum()), max(off, float(far))
    bound = getattr(chosen, dtype)
    assert off <= bound, f"{sum(wrong.values())} entries off by up to {off:.3g}: {list(wrong.items())[:3]}"


SEEDS = 32
RANDOM = {
    "dare_linear": {"density": 0.3},
    "dare_ties": {"density": 0.3},
    "della": {"density": 0.5, "epsilon": 0.2},
    "della_linear": {"density": 0.5, "epsilon": 0.2},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A base of 0.2 M parameters and two models that differ from it, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    work = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 2048}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes))
    for name in ("BASE", "ONE", "TWO"):
        save_model(model, work / name)
        copy_companions(open_checkpoint("attar:tiny").path, work / name)
        with torch.no_grad():
            for each in model.parameters():  # uneven: rescaling by the L1 norm differs from one over density
                each.add_(torch.randn_like(each) ** 3 * 1e-3)
    return {name: work / name for name in ("BASE", "ONE", "TWO")}


@pytest.fixture(scope="module")
def drawn(small, tmp_path_factory):
    """Merges of both tools: (method, number of models, tool) to a list of checkpoints, one for each seed."""
    work = tmp_path_factory.mktemp("drawn")
    runs, found = [], {}
    for method, each in RANDOM.items():
        for count in (1, 2):
            names = ("one", "two")[:count]
            made = case(method, *names, base="BASE", each={"weight": 1.0, **each}).text
            file = work / f"{method}-{count}.yml"
            file.write_text(configured(made, "float32", small))
            outs = {
                tool: [work / f"{tool}-{method}-{count}-{i}" for i in range(SEEDS)] for tool in ("a", "m")
            }
            runs += [{"config": str(file), "out": str(out), "seed": i} for i, out in enumerate(outs["m"])]
            for seed, out in enumerate(outs["a"]):
                attar.merge(file, out, seed=seed)
            found |= {(method, count, tool): each for tool, each in outs.items()}
    for line in mergekit(runs):
        assert "error" not in line, line
    return found


def deltas(outs, base, tensor):
    """What merges added to the base: (seeds, numbers)."""
    return torch.stack([stored(out)[tensor].flatten() - base[tensor].flatten() for out in outs])


TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
)


@pytest.mark.parametrize("method", RANDOM)
def test_masks_of_random_merges_have_mergekits_statistics(method, small, drawn):
    base, one = stored(small["BASE"]), stored(small["ONE"])
    given = RANDOM[method]
    for tensor in TENSORS:
        d = one[tensor] - base[tensor]
        size = d.numel()
        ranks = d.abs().argsort(dim=-1).argsort(dim=-1).flatten()
        upper = ranks >= d.shape[-1] // 2
        for tool in ("a", "m"):
            added = deltas(drawn[method, 1, tool], base, tensor)
            kept = added.abs() > 1e-9  # |base + d - base| of a kept d is at least that
            seen = d.flatten().abs() > 1e-7
            wanted = given["density"]
            spread = 6 * math.sqrt(wanted * (1 - wanted) / int(seen.sum()) / SEEDS)
            if "epsilon" not in given:  # every place is as likely: not only the mean but each seed and place
                assert kept[:, seen].float().mean() == pytest.approx(wanted, abs=spread), (tool, tensor)
                assert kept[:, seen & upper].float().mean() == pytest.approx(wanted, abs=2 * spread)
            else:  # density + epsilon / 2 for the larger half of a row, density - epsilon / 2 for the smaller
                shares = [float(kept[:, seen & half].float().mean()) for half in (upper, ~upper)]
                high, low = (wanted + sign * given["epsilon"] / 2 for sign in (1, -1))
                assert shares[0] == pytest.approx(high, abs=0.01), (tool, tensor)
                assert shares[1] == pytest.approx(low, abs=0.02), (tool, tensor)
            # the L1 norm of what is kept is that of the task vector, at every seed
            norms = added.abs().sum(-1) / d.abs().sum()
            assert (norms - 1).abs().max() < 1e-4, (tool, tensor, norms)
            # masks of two seeds have nothing in common
            first, second = (kept[i, seen].float() - kept[i, seen].float().mean() for i in (0, 1))
            alike = float((first * second).mean() / (first.std() * second.std()))
            allowed = 0.2 if "epsilon" in given else 6 / math.sqrt(size)
            assert abs(alike) < allowed, (tool, tensor, alike)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", RANDOM)
def test_the_mean_of_random_merges_over_seeds_is_mergekits(method, count, small, drawn):
    base = stored(small["BASE"])
    ratios = []
    for tensor in TENSORS:
        ours, theirs_ = (deltas(drawn[method, count, tool], base, tensor).double() for tool in ("a", "m"))
        variance = (ours.var(0) + theirs_.var(0)) / SEEDS
        seen = variance > 1e-18
        squares = (ours.mean(0) - theirs_.mean(0))[seen] ** 2
        ratios.append(float((squares / variance[seen]).mean()))
        shares = (ours.var(0) / (ours.var(0) + theirs_.var(0)))[seen]
        assert float(shares.mean()) == pytest.approx(0.5, abs=0.02), tensor
    # t^2 of two samples of one distribution: its mean is n / (n - 2) with n degrees of freedom
    freedom = 2 * (SEEDS - 1)
    assert ratios == pytest.approx([freedom / (freedom - 2)] * len(TENSORS), abs=0.12)
