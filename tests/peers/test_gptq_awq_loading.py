"""GPTQ and AWQ files of ours in GPTQModel and transformers, and files of GPTQModel's in ours.

All of it runs in the environment ``$ATTAR_PEERS/gptqmodel`` (benchmarks/peers/environments.py builds it; with
``optimum`` transformers loads GPTQ there), in one process, on the CPU: load_gptq_awq.py.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.formats import awq, gptq
from attar.formats.coded import Coded, dequantize
from attar.formats.limits import limits
from attar.formats.readers import reader
from attar.models.loading.load import load_model
from tests import tiny_models
from tests.formats.integer_weights import random_coded, rule

PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "gptqmodel" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no GPTQModel: set ATTAR_PEERS", allow_module_level=True)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

TOKENS = [[3, 40, 5, 60, 7, 80, 9, 100], [11, 12, 130, 14, 150, 16, 170, 18]]
FIRST, LAST, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
EVERYWHERE = ("auto", "torch", "direct")

# name: format, rule of all Linears, rules of some (None: dense), ways to load it
CASES = {
    **{f"gptq-{bits}": (gptq, rule(bits, 32), {}, EVERYWHERE) for bits in (2, 3, 4, 8)},
    **{f"gptq_v2-{bits}": (gptq, rule(bits, 32, symmetric=False), {}, EVERYWHERE) for bits in (2, 3, 4, 8)},
    "gptq-128": (gptq, rule(4, 128), {}, EVERYWHERE),
    "gptq-row": (gptq, rule(4, 0), {}, EVERYWHERE),
    "act-order": (gptq, rule(4, 32, ordered=True), {}, EVERYWHERE),
    "act-order_v2": (gptq, rule(3, 32, symmetric=False, ordered=True), {}, EVERYWHERE),
    "gptq-skip": (gptq, rule(4, 32), {LAST: None}, EVERYWHERE),
    "gptq-mixed": (gptq, rule(4, 32), {FIRST: rule(8, 32), LAST: rule(3, 128, symmetric=False)}, ("direct",)),
    "gptq-head": (gptq, rule(4, 32), {HEAD: rule(4, 32)}, ("direct",)),
    "awq-head": (awq, rule(4, 32, symmetric=False), {HEAD: rule(4, 32, symmetric=False)}, ("direct",)),
    "awq": (awq, rule(4, 32, symmetric=False), {}, EVERYWHERE),
    "awq-symmetric": (awq, rule(4, 128), {}, EVERYWHERE),
    "awq-row": (awq, rule(4, 0, symmetric=False), {}, EVERYWHERE),
    "awq-skip": (awq, rule(4, 32, symmetric=False), {LAST: None}, EVERYWHERE),
}
REFUSED = {  # hidden size, format, rule, rules of some, way, what it says, what limits says
    "groups-48": (96, gptq, rule(4, 48), {}, "auto", "group_size: actual group_size = `48`", "groups of 48"),
    "groups-8": (128, gptq, rule(4, 8), {}, "torch", "group_size: actual group_size = `8`", "groups of 8"),
    "awq-groups-256": (256, awq, rule(4, 256), {}, "direct", "actual group_size = `256`", "groups of 256"),
    "shape-3": (80, gptq, rule(3, 16), {}, "direct", "columns divisible by 3", "3-bit kernels unpack 32"),
    "cpu-16": (128, gptq, rule(4, 16), {}, "auto", "to be 32, 64, 128 or 256, got 16", "no groups of 16"),
    "mixed": (
        128,
        gptq,
        rule(4, 32),
        {FIRST: rule(8, 32)},
        "auto",
        "ignore_mismatched_sizes",
        "one rule for",
    ),
}
THEIRS = {  # bits, symmetric, act-order, format: what GPTQModel makes itself
    "theirs": (4, True, False, "gptq"),
    "theirs-asymmetric": (4, False, False, "gptq"),
    "theirs-act-order": (4, False, True, "gptq_v2"),
    "theirs-3": (3, False, False, "gptq"),
}
MORE = [
    *((name, "direct") for name in THEIRS),
    *((name, case[4]) for name, case in REFUSED.items()),
    ("gptq-head", "auto"),
    ("awq-head", "torch"),
]
LOADS = [(name, way) for name, case in CASES.items() for way in case[3]]


def rounded(weight: torch.Tensor, made, seed: int) -> Coded:
    """Rounded to nearest, float16 scales, groups in any order where the rule has one."""
    frame = random_coded(made, tuple(weight.shape), seed)
    width = made.group_size or weight.shape[1]
    order = torch.arange(weight.shape[1]) // width if frame.g_idx is None else frame.g_idx
    grouped = weight.float()[:, order.argsort(stable=True)].reshape(weight.shape[0], -1, width)
    half, low, high = 2 ** (made.bits - 1), grouped.amin(-1), grouped.amax(-1)
    if made.symmetric:
        scale, zero = (torch.maximum(high, -low) / (half - 0.5)).half().float(), None
    else:
        scale = ((high - low) / (2 * half - 1)).half().float()
        zero = (-half - low / scale).round().clamp(-half, half - 1)
    shifted = weight.float() / scale[:, order] + (0 if zero is None else zero[:, order])
    return Coded(shifted.round().clamp(-half, half - 1).to(torch.int8), scale, zero, g_idx=frame.g_idx)


def dense_model(hidden: int = 128):
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    return tiny_models.build("llama2", **sizes).half()


def write(path: Path, model, form, made, some) -> Path:
    """The model with its Linears in a format."""
    tiny_models.tokenizer().save_pretrained(path)
    state, rules, ignore = dict(model.state_dict()), {}, []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        own = some.get(name, None if name == HEAD else made)
        if own is None:
            ignore.append(name)
            continue
        weight = rounded(state.pop(f"{name}.weight"), own, len(rules))
        version = {"version": gptq.V2} if some and form is gptq and LAST in some and some[LAST] else {}
        state |= {f"{name}.{leaf}": t for leaf, t in form.encode(weight, own, **version).items()}
        rules[name] = own
    save_file({n: t.contiguous() for n, t in state.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"dtype": "float16", "quantization_config": form.quantization_config(rules, ignore=ignore)}
    (path / "config.json").write_text(json.dumps(config))
    return path


def pack_job(path: Path, bits: int, ordered: bool) -> Path:
    """Weight, scale and zero points for their packers."""
    weight_rule = rule(bits, 32, symmetric=False, ordered=ordered)
    weight = random_coded(weight_rule, (64, 128))
    half = 2 ** (bits - 1)
    order = torch.arange(128) // 32 if weight.g_idx is None else weight.g_idx
    parts = {"weight": dequantize(weight, 32), "scale": weight.scale, "zero": weight.zero + half}
    parts |= {"g_idx": order.int(), "codes": weight.codes.int() + half}
    save_file(parts, path / f"{bits}-{ordered}")
    return path / f"{bits}-{ordered}"


PACKS = [(bits, ordered) for bits in (2, 3, 4, 8) for ordered in (False, True)]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Every checkpoint, and what the environment loaded from it."""
    path = tmp_path_factory.mktemp("gptq_awq")
    model = dense_model()
    for name, (form, result, some, _) in CASES.items():
        write(path / name, model, form, result, some)
    for name, (hidden, form, result, some, *_) in REFUSED.items():
        write(path / name, dense_model(hidden), form, result, some)
    model.model.layers[0].mlp.down_proj.weight.data.abs_()  # groups without negatives: zero points of 0
    tiny_models.save(model, path / "dense")
    job = {
        "model": str(path / "dense"),
        "tokens": TOKENS,
        "quantize": [(str(path / name), *message) for name, message in THEIRS.items()],
        "pack": [str(pack_job(path, *message)) for message in PACKS],
        "load": [(str(path / name), way) for name, way in (*LOADS, *MORE)],
    }
    (path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("load_gptq_awq.py"), path / "job.json"],
        env={
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "GPTQMODEL_CPU_WORKERS": "2",
            "TMPDIR": str(path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def got(work, name, way):
    """What was written down of a load."""
    record = json.loads((work / name / f"{way}.json").read_text())
    if "requires optimum" in record.get("error", ""):
        pytest.skip(record["error"])
    assert "error" not in record, record["error"]
    return record, load_file(work / name / f"{way}.safetensors")


@pytest.mark.parametrize(("name", "way"), LOADS)
def test_they_load_our_files(work, name, way):
    message, actual = got(work, name, way)
    model = load_model(work / name, dtype=torch.float16)
    wanted = model(input_ids=torch.tensor(TOKENS)).logits.detach().float()
    close = 0.03 if way == "auto" else 0.003  # some kernels of the CPU compute in bfloat16
    assert (actual.pop("logits") - wanted).abs().max() < close * wanted.abs().max()
    checkpoint = open_checkpoint(work / name)
    packed = [tensor.removesuffix(".qweight") for tensor in checkpoint.tensors if tensor.endswith(".qweight")]
    assert message["count"] == len(packed)
    if way != "auto":
        state = model.state_dict()
        assert sorted(actual) == sorted(f"{base}.weight" for base in packed)
        assert all(torch.equal(actual[weight], state[weight]) for weight in actual)


@pytest.mark.parametrize("name", list(REFUSED))
def test_they_refuse_what_limits_says(work, name):
    hidden, form, result, some, way, error, sentence = REFUSED[name]
    record = json.loads((work / name / f"{way}.json").read_text())
    if "requires optimum" in record.get("error", ""):
        pytest.skip(record["error"])
    assert error in record["error"]
    linears = {n: tuple(m.weight.shape) for n, m in dense_model(hidden).named_modules() if n.endswith("proj")}
    known = limits(form.METHOD, linears, {linear: some.get(linear, result) for linear in linears}, heads=4)
    assert any(sentence in one for one in known)


@pytest.mark.parametrize(("name", "way"), [("gptq-head", "auto"), ("awq-head", "torch")])
def test_transformers_leaves_the_head_random(work, name, way):
    message, actual = got(work, name, way)
    wanted = load_model(work / name)(input_ids=torch.tensor(TOKENS)).logits.detach().float()
    assert message["count"] == 14 and (actual["logits"] - wanted).abs().max() > 0.3 * wanted.abs().max()


@pytest.mark.parametrize("name", list(THEIRS))
def test_we_read_their_files(work, name):
    _, actual = got(work, name, "direct")
    checkpoint = open_checkpoint(work / name)
    read = reader(checkpoint)
    del actual["logits"]
    assert len(actual) == 14
    for weight, tensor in actual.items():
        assert torch.equal(read.decode(f"{weight.removesuffix('weight')}qweight"), tensor)
    codes, result = read.codes("model.layers.0.mlp.down_proj.qweight")
    bits, symmetric, order, _ = THEIRS[name]
    assert (result.bits, result.symmetric, result.ordered) == (bits, symmetric, order)
    if not symmetric:
        assert (codes.zero == -(2 ** (bits - 1))).any(), "the case of a zero point of 0 is there"


@pytest.mark.parametrize(("bits", "ordered"), PACKS)
def test_their_packers_make_our_words(work, bits, ordered):
    theirs = load_file(work / f"{bits}-{ordered}.out")
    weight_rule = rule(bits, 32, symmetric=False, ordered=ordered)
    weight = random_coded(weight_rule, (64, 128))
    ours = gptq.encode(weight, weight_rule)
    assert all(torch.equal(ours[leaf], theirs[leaf].to(ours[leaf].dtype)) for leaf in ours)
    if bits == 4 and not ordered:
        ours = awq.encode(weight, weight_rule)
        assert torch.equal(ours["qweight"], theirs["awq_qweight"])
        assert torch.equal(ours["qzeros"], theirs["awq_qzeros"])
