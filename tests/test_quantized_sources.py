"""Packed checkpoints as the source of every verb: as on their dense copy, tensor by tensor, codes carried
where the grid stays, and refused in one line where they do not fit."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import attar
from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError
from attar.formats.readers import Decoded, reader
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import quantized_sources, tiny_models, tiny_mtp
from tests.cases import mostly_slow

TEXT = {"data": str(Path(json.__file__).parent), "sequence_length": 32, "batch_size": 2}
FEW = {**TEXT, "samples": 2}
ROUND = {"scheme": "W4A16", "group_size": 32, "method": "rtn", "check_tokens": 0}
MERGE = "merge_method: linear\nmodels:\n" + "  - model: {}\n    parameters: {{weight: 0.5}}\n" * 2


def same(one, other):
    """Whether two results have the same tensors, bit for bit, and the same config."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in (one, other)]
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    equal = [
        torch.equal(first[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
        for name, tensor in second.items()
    ]
    return configs[0] == configs[1] and first.keys() == second.keys() and all(equal)


VERBS = {
    "gptq": lambda source, out, dense: attar.quantize(source, out, **{**ROUND, **FEW, "method": "gptq"}),
    "wanda": lambda source, out, dense: attar.prune(source, out, method="wanda", **FEW),
    "neurons": lambda source, out, dense: attar.prune(source, out, method="neurons", ratio=0.5, **FEW),
    "exl2": lambda source, out, dense: attar.export(source, out, format="exl2", bits=4.0, **FEW),
    "merge": lambda source, out, dense: attar.merge(MERGE.format(source, dense), out),
    "teacher": lambda source, out, dense: attar.distill(source, out, layers=1, steps=2, **TEXT),
    "student": lambda source, out, dense: attar.distill(dense, out, student=str(source), steps=2, **TEXT),
    "recover": lambda source, out, dense: attar.recover(source, out, teacher=dense, steps=2, **TEXT),
}


@pytest.mark.parametrize("kind", mostly_slow(quantized_sources.KINDS, ["mlx-mxfp4"]))
def test_rounded_and_pruned_as_the_dense_copy_is(kind, tmp_path):
    source = quantized_sources.make(kind, tmp_path)
    copy = attar.export(source, tmp_path / "copy", format="dense").path
    for number, model in enumerate((source, copy)):
        attar.prune(model, tmp_path / f"pruned-{number}", method="magnitude")
        attar.quantize(
            model, tmp_path / f"rounded-{number}", **ROUND | {"scheme": "W4A16_ASYM", "group_size": 16}
        )
    assert same(tmp_path / "pruned-0", tmp_path / "pruned-1")
    assert same(tmp_path / "rounded-0", tmp_path / "rounded-1")


@pytest.mark.parametrize("verb", mostly_slow(VERBS, [verb for verb in VERBS if verb != "exl2"]))
def test_every_verb_does_as_on_the_dense_copy(verb, tmp_path):
    """Those of FP8 in blocks, whose inputs are rounded where it is evaluated, and nowhere here."""
    source = quantized_sources.make("fp8", tmp_path)
    copy = attar.export(source, tmp_path / "copy", format="dense").path
    for number, model in enumerate((source, copy)):
        VERBS[verb](model, tmp_path / f"out-{number}", tmp_path / "dense")
    assert same(tmp_path / "out-0", tmp_path / "out-1")


def test_a_gguf_file_is_rounded_with_data_as_from_the_dense_copy(tmp_path):
    source = quantized_sources.make("fp8", tmp_path)
    copy = attar.export(source, tmp_path / "copy", format="dense").path
    files = [tmp_path / name for name in ("one.gguf", "other.gguf")]
    options = {"format": "gguf", "type": "Q4_0", "rounding": "gptq", "effort": "fast", **FEW}
    one, other = (
        attar.export(model, file, **options) for model, file in zip((source, copy), files, strict=True)
    )
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.load(name), other.load(name)) for name in one.tensors)
    notes = one.card.details["notes"], other.card.details["notes"]
    assert any("quantized already (fp8)" in note for note in notes[0]) and not any(
        "already" in note for note in notes[1]
    )


def test_experts_are_removed_as_from_the_dense_copy(tmp_path):
    source = quantized_sources.make("mxfp4", tmp_path)
    copy = attar.export(source, tmp_path / "copy", format="dense").path
    for number, model in enumerate((source, copy)):
        attar.prune(model, tmp_path / f"out-{number}", method="experts", ratio=0.5, **FEW)
    assert same(tmp_path / "out-0", tmp_path / "out-1")


def test_a_multi_token_prediction_head_is_decoded_and_carried_too(tmp_path):
    dense = tiny_mtp.save("qwen2", tmp_path / "dense", dtype=torch.bfloat16, **quantized_sources.SIZES)
    source = quantized_sources.to_fp8(dense, tmp_path / "fp8")
    copy = attar.export(source, tmp_path / "copy", format="dense").path
    for number, model in enumerate((source, copy)):
        attar.prune(model, tmp_path / f"pruned-{number}", method="magnitude")
        attar.quantize(model, tmp_path / f"rounded-{number}", **ROUND)
    assert same(tmp_path / "pruned-0", tmp_path / "pruned-1")
    assert same(tmp_path / "rounded-0", tmp_path / "rounded-1")
    carried = attar.quantize(
        source, tmp_path / "carried", **ROUND | {"scheme": "FP8_BLOCK", "group_size": -1}
    )
    name = f"{tiny_mtp.block_name('qwen2', 2)}.mlp.up_proj.weight"
    stored = load_file(source / "model.safetensors")
    assert torch.equal(carried.load(name).float(), stored[name].float())
    assert torch.equal(carried.load(f"{name}_scale"), stored[f"{name}_scale_inv"])
    shorter = attar.prune(source, tmp_path / "shorter", method="layers", ratio=0.5, **FEW)
    assert shorter.load(name).equal(open_checkpoint(copy).load(name))


CARRIED = {
    "fp8": ("FP8_BLOCK", 14),
    "mxfp4": ("MXFP4A16", 48),
    "nvfp4": ("NVFP4A16", 14),
    "modelopt": ("NVFP4A16", 14),
    "compressed-tensors": ("W4A16", 14),
    "w8a8": ("W8A8", 14),
    "gptq": ("W4A16_ASYM", 14),
    "awq": ("W4A16", 14),
    "int8": ("W8A8", 14),
    "gguf": ("W8A16", 14),
    "mlx-mxfp4": ("MXFP4A16", 14),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_codes_are_carried_where_the_grid_stays(kind, tmp_path):
    source = quantized_sources.make(kind, tmp_path)
    scheme, count = CARRIED[kind]
    group_size = 32 if scheme[:2] in ("W4", "W8") else -1
    ignore = ("re:self_attn",) if kind == "mxfp4" else ()
    rtn = {**ROUND, "scheme": scheme, "group_size": group_size, "ignore": ignore}
    out = attar.quantize(source, tmp_path / "out", **rtn)
    rows = out.card.details["layers"]
    assert len(rows) == sum(row.get("carried", False) for row in rows) == count
    before, after = admit(source, dense=True), Decoded(out)
    read = reader(out)
    for info in out.tensors.values():
        coded = read.codes(info.name)
        if coded is not None and kind != "mxfp4":
            name = read.header(info)[0]
            wanted = before.codes(name)
            assert torch.equal(coded[0].codes.float(), wanted.codes.float())
            torch.testing.assert_close(
                coded[0].scale, wanted.scale, rtol=2e-7 if kind == "modelopt" else 0, atol=0
            )
    if kind == "mxfp4":
        models = [load_model(model, dtype=torch.float32) for model in (source, out)]
        tokens = tiny_models.tokens(models[0])
        first, second = (tiny_models.logits(model, tokens) for model in models)
        assert torch.equal(first, second)
    for name in after.tensors.keys() & before.tensors.keys():
        wanted = before.load(name)
        torch.testing.assert_close(after.load(name).to(wanted.dtype), wanted, rtol=2**-7, atol=0)


def test_a_line_says_what_is_lost_twice(tmp_path):
    source = quantized_sources.make("fp8", tmp_path)
    lines = []
    progress = type(
        "Lines", (), {"log": lambda self, line: lines.append(line), "task": attar.progress.SILENT.task}
    )()
    options = {key: value for key, value in ROUND.items() if key != "scheme"}
    mixed = quantize_settings(**options, scheme="FP8_BLOCK", overrides=("re:mlp=W4A16",))
    quantize(source, tmp_path / "mixed", mixed, progress=progress)
    assert any("fp8 is quantized already (fp8): 8 of 14 Linears keep their codes" in line for line in lines)
    quantize(source, tmp_path / "same", quantize_settings(**options, scheme="FP8_BLOCK"), progress=progress)
    assert any("nothing is rounded again" in line for line in lines)


def test_one_tensor_is_decoded_at_a_time(tmp_path, monkeypatch):
    source = quantized_sources.make("fp8", tmp_path)
    alive, most, load = weakref.WeakSet(), [], Decoded.load

    def counted(view, name):
        tensor = load(view, name)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(Decoded, "load", counted)
    attar.quantize(source, tmp_path / "out", **ROUND)
    assert len(most) == len(open_checkpoint(tmp_path / "dense").tensors) and max(most) <= 2


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(method, tmp_path, monkeypatch):
    source = quantized_sources.make("fp8", tmp_path)
    options = {**ROUND, "method": method} | (FEW if method == "gptq" else {})
    attar.quantize(source, tmp_path / "whole", **options)
    loaded, load = [], Decoded.load

    def killed(view, name):
        loaded.append(name)
        if len(loaded) == 18:
            raise KeyboardInterrupt
        return load(view, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Decoded, "load", killed)
        attar.quantize(source, tmp_path / "out", **options)
    attar.quantize(source, tmp_path / "out", **options)
    assert same(tmp_path / "whole", tmp_path / "out")


def _changed(folder, change):
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


NAME = "model.layers.0.mlp.up_proj.weight"
DAMAGED = {
    "is missing": lambda tensors, config: tensors.pop(f"{NAME}_scale_inv"),
    r"do not fit together \(.* in blocks of 128 x 128, F32 scales \[2, 2\]\)": lambda tensors, config: (
        tensors.update({f"{NAME}_scale_inv": torch.ones(2, 2)})
    ),
    "weight_block_size is 128, but must be two whole numbers": lambda tensors, config: config.update(
        weight_block_size=128
    ),
    r"\(I8\) is of another quantization than fp8": lambda tensors, config: tensors.update(
        {NAME: tensors[NAME].view(torch.int8)}
    ),
    "of another quantization than fp8, which config.json names": lambda tensors, config: tensors.update(
        {"model.layers.0.mlp.up_proj.qweight": torch.zeros(16, 256, dtype=torch.int32)}
    ),
}


@pytest.mark.parametrize("problem", DAMAGED)
def test_what_does_not_fit_is_refused_by_the_gate_of_all_verbs(problem, tmp_path):
    source = quantized_sources.make("fp8", tmp_path)
    _changed(source, DAMAGED[problem])
    with pytest.raises(CheckpointError, match=problem) as raised:
        admit(source)
    assert "\n" not in raised.value.message and raised.value.hint
    for verb in VERBS.values():
        with pytest.raises(CheckpointError, match=problem):
            verb(source, tmp_path / "out", tmp_path / "dense")
    assert not (tmp_path / "out").exists()
