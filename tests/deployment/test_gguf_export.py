"""GGUF files: what is written is what was rounded, codes are carried over, budgets are met, bad input is
refused by name and leaves nothing behind."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.tensors import read_tensor
from attar.deployment import stage
from attar.deployment.importance import InputImportance
from attar.deployment.importance import entries_of as importance_entries
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import card_beside, export
from attar.errors import CheckpointError, DataError, ModelError, NumericsError, OutputError, SettingsError
from attar.formats.gguf import container
from attar.formats.gguf.imatrix import ImportanceEntry, write_imatrix
from attar.formats.gguf.tensor_map import placements
from attar.formats.readers import Decoded, reader
from attar.models.loading.load import load_model
from attar.progress import SILENT
from attar.quantization import settings as settings_module
from attar.quantization.hessian import Hessian, output_error
from tests import tiny_models
from tests.quantization.packing import pack, save

CALIBRATION = {"samples": 8, "sequence_length": 32, "batch_size": 4, "precision": "fp32"}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Steps of tuning of a few tokens."""
    monkeypatch.setattr(settings_module, "STEP_TOKENS", (64, 64))
    monkeypatch.setitem(settings_module.TUNE_TOKENS, "good", 32 * 64)


@pytest.fixture
def wide(tmp_path):
    """A tiny Llama whose Linears have 256 and 512 inputs."""
    return save(tmp_path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=2)


def settings(**changes):
    return ExportSettings(**{"format": "gguf", "imatrix": "none", **changes})


def kinds(file):
    return {name: info.kind for name, info in container.read_gguf(file).tensors.items()}


def matrices(file):
    """What the gguf library decodes, by name."""
    return {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        for tensor in GGUFReader(file).tensors
        if len(tensor.shape) == 2
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["Q4_K_M", "Q3_K_S", "Q6_K", "Q8_0", "IQ4_XS", "Q5_1", "MXFP4", "NVFP4", "BF16"]
)
def test_every_type_stays_near_the_model_and_loads(wide, tmp_path, name):
    exported = export(wide, tmp_path / f"{name}.gguf", settings(type=name, imatrix="auto"))
    assert exported.path.is_dir() and open_checkpoint(tmp_path / f"{name}.gguf").card.stage == "export"
    rows = tiny_models.tokens(load_model(wide))
    wanted = tiny_models.logits(load_model(wide, dtype=torch.float32), rows)
    got = tiny_models.logits(load_model(exported, dtype=torch.float32), rows)
    bound = {"Q8_0": 0.05, "BF16": 1e-5, "Q6_K": 0.15}.get(name, 0.9)
    assert (got - wanted).norm() / wanted.norm() < bound
    assert name in exported.card.details["type"]


def test_the_file_holds_what_its_grids_say(wide, tmp_path):
    """Weights of the file, decoded by the gguf library, are no farther than plain rounding puts them, and the
    rows of queries stand in pairs."""
    export(wide, tmp_path / "q8.gguf", settings(type="Q8_0"))
    actual, source = matrices(tmp_path / "q8.gguf"), open_checkpoint(wide)
    weight = source.load("model.layers.1.mlp.down_proj.weight").float()
    step = weight.reshape(-1, 32).abs().amax(1).repeat_interleave(32).reshape(weight.shape) / 127
    plain = (weight / step).round() * step
    assert (actual["blk.1.ffn_down.weight"] - weight).norm() <= (plain - weight).norm()
    heads = source.config["num_attention_heads"]
    query = source.load("model.layers.0.self_attn.q_proj.weight").float()
    paired = query.reshape(heads, 2, -1, query.shape[1]).transpose(1, 2).reshape(query.shape)
    assert (actual["blk.0.attn_q.weight"] - paired).norm() < 0.01 * paired.norm()
    assert (query - paired).norm() > 0.5 * paired.norm()


@pytest.mark.few(1)
@pytest.mark.parametrize("rounding", ["gptq", "yaqa", "nearest"])
def test_numbers_of_blocks_and_norms_are_tuned_at_the_same_bytes(wide, tmp_path, rounding):
    """Codes stay; of a k-quant d and d_m alone differ, and norms."""
    files = {}
    for effort in ("fast", "good"):
        chosen = settings(type="Q3_K_S", rounding=rounding, effort=effort, **CALIBRATION)
        files[effort] = export(wide, tmp_path / f"{effort}.gguf", chosen)
    told = files["good"].card.details["tuning"]
    assert told["taken"] and told["after"] < told["before"] and told["steps"] == 32
    assert "tuning" not in files["fast"].card.details
    before, after = (container.read_gguf(tmp_path / f"{effort}.gguf").tensors for effort in files)
    changed = set()
    for name, tensor in before.items():
        one, other = read_tensor(tensor.info), read_tensor(after[name].info)
        if torch.equal(one, other):
            continue
        changed.add(name.partition(".")[0] if "norm" in name else "block")
        if tensor.kind == "Q3_K":  # 110 bytes a block, the last two its d
            stays = [view.view(torch.uint8).reshape(-1, 110)[:, :108] for view in (one, other)]
            assert torch.equal(*stays), name
    assert changed == {"block", "blk", "output_norm"}
    assert (tmp_path / "fast.gguf").stat().st_size == (tmp_path / "good.gguf").stat().st_size


@pytest.mark.slow
def test_the_record_has_the_rows_that_tuning_reads_of_a_short_context(tmp_path, monkeypatch):
    """Rows are cut at the context, so tuning reads more of them than of rows of the given length."""
    short = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    recorded = []
    monkeypatch.setattr(
        stage, "record", lambda *_, length, rows: recorded.append((length, rows)) or {"stage": "export"}
    )
    monkeypatch.setattr(stage, "note_texts", lambda *_: None)
    chosen = settings(type="Q3_K_S", effort="good", **CALIBRATION | {"sequence_length": 512})
    export(save(tmp_path / "model", **short), tmp_path / "out.gguf", chosen)
    assert recorded == [(64, 8 + 32 + 8192 // 64)]


@pytest.mark.slow
def test_a_quantized_model_is_tuned_to_what_it_computes(wide, tmp_path):
    export(wide, tmp_path / "q4.gguf", settings(type="Q4_K_S"))
    tuned = settings(type="Q3_K_S", effort="good", **CALIBRATION)
    exported = export(tmp_path / "q4.gguf", tmp_path / "q3.gguf", tuned)
    assert exported.card.details["tuning"]["after"] <= exported.card.details["tuning"]["before"]
    assert any("rounded a second time" in note for note in exported.card.details["notes"])


def test_rounding_with_data_beats_nearest_at_the_same_bytes(wide, tmp_path):
    """On the calibration text's own inputs, layer by layer."""
    plain = export(wide, tmp_path / "plain.gguf", settings(type="Q3_K_S"))
    rounded = export(
        wide, tmp_path / "gptq.gguf", settings(type="Q3_K_S", rounding="gptq", effort="fast", **CALIBRATION)
    )
    assert kinds(tmp_path / "plain.gguf") == kinds(tmp_path / "gptq.gguf")
    assert (tmp_path / "plain.gguf").stat().st_size == (tmp_path / "gptq.gguf").stat().st_size
    layers = {row["name"]: row for row in rounded.card.details["layers"]}
    assert len(layers) == 14 and all(row["error"] < row["rtn_error"] for row in layers.values())
    assert not plain.card.details["layers"]
    weight = open_checkpoint(wide).load("model.layers.0.mlp.gate_proj.weight").float()
    H = Hessian(256)
    H.add(_inputs(wide))
    old, new = (
        output_error(weight, matrices(tmp_path / f"{name}.gguf")["blk.0.ffn_gate.weight"], H.value())
        for name in ("plain", "gptq")
    )
    assert new < 0.9 * old


def _inputs(folder):
    """Inputs of the first gate projection on text of the calibration split."""
    from attar.data.packing import calibration_batches
    from attar.data.sources import COMPRESSION
    from attar.models.loading.load import load_tokenizer

    model, seen = load_model(folder, dtype=torch.float32), []
    model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    batches = calibration_batches(
        load_tokenizer(folder),
        "python-stdlib",
        samples=8,
        sequence_length=32,
        batch_size=8,
        seed=0,
        split=COMPRESSION,
    )
    with torch.no_grad():
        model(batches[0])
    return seen[0]


def test_importance_is_computed_written_and_read_again(wide, tmp_path):
    exported = export(wide, tmp_path / "out", settings(type="Q4_K_S", imatrix="compute", **CALIBRATION))
    file = tmp_path / "out" / "imatrix.gguf"
    again = export(wide, tmp_path / "again", settings(type="Q4_K_S", imatrix=str(file)))
    for name in exported.tensors:
        assert torch.equal(exported.load(name), again.load(name)), name
    plain = export(wide, tmp_path / "plain", settings(type="Q4_K_S"))
    assert any(not torch.equal(exported.load(name), plain.load(name)) for name in exported.tensors)
    other = save(tmp_path / "other", hidden_size=128, intermediate_size=512)
    with pytest.raises(SettingsError, match="one of this model"):
        export(other, tmp_path / "wrong", settings(type="Q4_0", imatrix=str(file)))


def entries_of(model, **changes):
    """Importance of every Linear of the blocks, with changes by a part of the name; None removes one."""
    matrix = {}
    for one in placements(model.config, model.tensors):
        if one.matrix and one.gguf != "token_embd.weight":
            matrix[one.gguf] = ImportanceEntry(torch.rand(one.shape[-1]) + 0.1, 64.0)
    for name in list(matrix):
        for part, entry in changes.items():
            if part in name:
                matrix[name] = entry(matrix[name])
    return {name: entry for name, entry in matrix.items() if entry is not None}


def zeroed(entry):
    return replace(entry, in_sum2=entry.in_sum2.index_fill(0, torch.tensor([1, 2]), 0.0))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({}, "scales are searched with the importance"),
        (
            {"1.ffn_up": lambda _: None},
            "1 tensors have no importance (blk.1.ffn_up.weight)",
        ),
        (
            {"1.ffn_up": lambda one: replace(one, count=0.0)},
            "1 tensors have no importance (blk.1.",
        ),
        ({"1.ffn_up": zeroed}, "2 inputs of 1 layer are zero on all calibration text"),
    ],
)
@pytest.mark.parametrize("binary", [False, True])
def test_what_an_importance_matrix_lacks_is_said(wide, tmp_path, change, note, binary):
    file = tmp_path / "imatrix"
    entries = entries_of(open_checkpoint(wide), **change)
    if binary and all(one.count for one in entries.values()):  # it has no count of 0
        parts = [struct.pack("<i", len(entries))]
        for name, one in entries.items():
            head = struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 64, len(one.in_sum2))
            parts.append(head + one.in_sum2.numpy().tobytes())
        file.write_bytes(b"".join(parts))
    else:
        write_imatrix(file, entries, ["text"], 1, 64)
    exported = export(wide, tmp_path / "out.gguf", settings(type="Q4_K_S", imatrix=str(file)))
    notes = exported.card.details["notes"]
    assert any(note in line for line in notes)
    assert any("no importance" in line for line in notes) == ("no importance" in note)


def test_an_input_that_was_never_seen_counts_as_a_usual_one(wide, tmp_path):
    (one,) = [one for one in placements(open_checkpoint(wide).config, open_checkpoint(wide).tensors)
              if one.gguf == "blk.0.ffn_up.weight"]  # fmt: skip
    entry = ImportanceEntry(torch.tensor([0.0, 2.0, 4.0, 6.0]), 2.0)
    assert InputImportance({one.gguf: entry}).vector(one).tolist() == [2.0, 1.0, 2.0, 3.0]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1e-10, 1e9])
def test_weights_that_float16_scales_cannot_hold_are_refused(wide, tmp_path, size):
    changed(wide, "model.layers.0.mlp.up_proj.weight", lambda weight: weight * size)
    with pytest.raises(NumericsError, match=r"layers.0.mlp.up_proj.weight does not fit Q4_K"):
        export(wide, tmp_path / "out.gguf", settings(type="Q4_K_S"))
    assert not (tmp_path / "out.gguf").exists()
    export(wide, tmp_path / "f.gguf", settings(type="Q4_K_S", overrides=("blk.0.ffn_up=F32",)))


def changed(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: change(tensors[name])}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_a_linear_whose_inputs_are_zero_is_rounded_to_nearest(wide, tmp_path, rounding):
    changed(wide, "model.layers.0.self_attn.v_proj.weight", torch.zeros_like)
    name = "model.layers.0.self_attn.o_proj.weight"
    out = tmp_path / "out.gguf"
    exported = export(wide, out, settings(type="Q4_0", rounding=rounding, imatrix="auto", **CALIBRATION))
    weight, got = open_checkpoint(wide).load(name).float(), Decoded(exported).load(name).float()
    assert (got - weight).norm() < 0.12 * weight.norm()
    assert any("zero on all calibration text" in line for line in exported.card.details["notes"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scheme", "group", "wanted"),
    [("W4A16", 64, "Q4_0"), ("W8A16", 32, "Q8_0"), ("W3A16", 32, "Q4_0"), ("MXFP4A16", 32, "MXFP4")],
)
def test_codes_are_carried_over(tmp_path, scheme, group, wanted):
    source = pack(save(tmp_path / "dense"), tmp_path / "packed", scheme=scheme, group_size=group)[1]
    exported = export(source, tmp_path / "out.gguf", settings())
    assert exported.card.details["carried"] == 21
    assert kinds(tmp_path / "out.gguf")["blk.0.ffn_up.weight"] == wanted
    actual, dense = matrices(tmp_path / "out.gguf"), Decoded(source)
    for name in ("up", "down", "gate"):
        weight = dense.load(f"model.layers.2.mlp.{name}_proj.weight")
        assert torch.equal(actual[f"blk.2.ffn_{name}.weight"].to(weight.dtype), weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["mixtral", "llama3"])
def test_nvfp4_is_carried_with_the_scale_of_each_weight_beside_it(tmp_path, family):
    folder = save(tmp_path / "dense", family, num_hidden_layers=2)
    source = pack(folder, tmp_path / "packed", scheme="NVFP4A16")[1]
    exported = export(source, tmp_path / "out.gguf", settings())
    stored = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out.gguf").tensors}
    whole = torch.from_numpy(stored["blk.1.attn_v.scale"].data.copy())
    module = "model.layers.1.self_attn.v_proj"
    assert torch.equal(whole, 1.0 / source.load(f"{module}.weight_global_scale"))
    value = stored["blk.1.attn_v.weight"]
    theirs = torch.from_numpy(dequantize(value.data, value.tensor_type)) * whole
    assert torch.allclose(theirs, Decoded(source).load(f"{module}.weight").float(), rtol=2**-8)
    assert torch.equal(theirs, Decoded(exported).load(f"{module}.weight"))
    wanted, got = Decoded(source), Decoded(exported)
    for name in wanted.tensors:
        assert torch.allclose(got.load(name).float(), wanted.load(name).float(), rtol=2**-8), name
    if family == "mixtral":
        experts = stored["blk.1.ffn_up_exps.scale"].data
        assert len(experts) == tiny_models.EXPERTS and len(set(experts.tolist())) > 1
    assert open_checkpoint(tmp_path / "out.gguf").nbytes < 1.4 * source.nbytes


def test_codes_without_a_type_are_decoded_and_reported(tmp_path):
    source = pack(save(tmp_path / "dense"), tmp_path / "packed", scheme="FP8_DYNAMIC")[1]
    exported = export(source, tmp_path / "out.gguf", settings())
    assert exported.card.details["carried"] == 0
    assert any("cannot keep their codes" in note for note in exported.card.details["notes"])


@pytest.mark.slow
def test_a_file_read_back_and_written_again_is_the_same(wide, tmp_path):
    first = export(wide, tmp_path / "a.gguf", settings(type="Q4_0"))
    export(first, tmp_path / "b.gguf", settings())
    old, new = container.read_gguf(tmp_path / "a.gguf"), container.read_gguf(tmp_path / "b.gguf")
    for name, info in old.tensors.items():
        if info.kind == "Q4_0":
            assert new.tensors[name].kind == "Q4_0" and torch.equal(new.load(name), old.load(name)), name


def test_overrides_and_budgets(wide, tmp_path):
    exported = export(wide, tmp_path / "a.gguf", settings(type="Q4_K_S", overrides=("ffn_down=Q8_0",)))
    assert {kind for name, kind in kinds(tmp_path / "a.gguf").items() if "ffn_down" in name} == {"Q8_0"}
    assert exported.card.details["types"]["Q8_0"] == 2
    with pytest.raises(SettingsError, match="pattern that some matrix"):
        export(wide, tmp_path / "b.gguf", settings(type="Q4_K_S", overrides=("nothing=Q8_0",)))
    few = CALIBRATION | {"samples": 2, "sequence_length": 16}
    sized = export(wide, tmp_path / "c.gguf", settings(size="830KB", **few))
    assert (tmp_path / "c.gguf").stat().st_size <= 830_000
    assert len(sized.card.details["types"]) > 2
    with pytest.raises(SettingsError, match="at least"):
        export(wide, tmp_path / "d.gguf", settings(size="10KB", **few))


def test_parts(wide, tmp_path):
    exported = export(wide, tmp_path / "out", settings(type="Q8_0", max_file="700KB"))
    files = sorted((tmp_path / "out").glob("*.gguf"))
    assert len(files) > 1 and all(file.stat().st_size <= 700_000 for file in files)
    assert files[0].name.endswith(f"-00001-of-{len(files):05d}.gguf")
    whole = export(wide, tmp_path / "whole.gguf", settings(type="Q8_0"))
    assert all(torch.equal(exported.load(name), whole.load(name)) for name in whole.tensors)
    with pytest.raises(SettingsError, match="max_file"):
        export(wide, tmp_path / "one.gguf", settings(type="Q8_0", max_file="700KB"))


@pytest.mark.slow
def test_same_input_same_bytes(wide, tmp_path):
    for name in ("a", "b"):
        export(wide, tmp_path / f"{name}.gguf", settings(type="Q4_K_M", rounding="gptq", **CALIBRATION))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_what_cannot_be_is_refused_before_any_work(wide, tmp_path):
    opt = tiny_models.save(tiny_models.build("opt"), tmp_path / "opt")
    for source, change, error, match in (
        (opt, {}, ModelError, "opt"),
        (wide, {"type": "Q4_K_X"}, SettingsError, "Q4_K"),
    ):
        with pytest.raises(error, match=match):
            export(source, tmp_path / "out.gguf", settings(**change))
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_files_are_not_overwritten_unasked(wide, tmp_path):
    export(wide, tmp_path / "a.gguf", settings(type="Q8_0"))
    assert card_beside(tmp_path / "a.gguf").exists()
    with pytest.raises(OutputError, match="already exists"):
        export(wide, tmp_path / "a.gguf", settings(type="Q8_0"))
    export(wide, tmp_path / "a.gguf", settings(type="Q4_0"), force=True)
    assert kinds(tmp_path / "a.gguf")["blk.0.ffn_up.weight"] == "Q4_0"


def test_a_damaged_write_is_noticed(wide, tmp_path, monkeypatch):
    """A byte that changes between memory and disk is an error, and nothing is left behind."""
    from attar.formats.gguf.writer import GGUFWriter

    finish = GGUFWriter.finish

    def broken(self):
        result = finish(self)
        data = bytearray(result[0].read_bytes())
        data[-100] ^= 1
        result[0].write_bytes(bytes(data))
        return result

    monkeypatch.setattr(GGUFWriter, "finish", broken)
    with pytest.raises(NumericsError, match="reads back differently"):
        export(wide, tmp_path / "a.gguf", settings(type="Q8_0"))
    assert not (tmp_path / "a.gguf").exists()


def test_damaged_files_are_refused_by_name(wide, tmp_path):
    export(wide, tmp_path / "a.gguf", settings(type="Q8_0"))
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        open_checkpoint(tmp_path / "short.gguf")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = tiny_models.build("llama3", hidden_size=128, intermediate_size=256)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = np.nan
    folder = tiny_models.save(model, tmp_path / "nan")
    for name in ("Q4_0", "F16", "MXFP4"):
        with pytest.raises(NumericsError, match="up_proj"):
            export(folder, tmp_path / "out.gguf", settings(type=name))


@pytest.mark.slow
def test_few_bits_rounded_to_nearest_name_the_better_rounding(wide, tmp_path):
    def notes(**changes):
        exported = export(wide, tmp_path / "a.gguf", settings(imatrix="none", **changes), force=True)
        return [note for note in exported.card.details["notes"] if "--rounding gptq" in note]

    assert notes(type="Q2_K") == ["Q2_K is rounded to nearest; --rounding gptq takes longer and loses less"]
    assert not notes(type="Q4_K_M") and not notes(type="Q2_K", rounding="qronos", samples=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Q4_K_M", "Q4_1", "IQ4_XS", "MXFP4", "NVFP4"])
def test_auto_keeps_the_blocks_of_a_gguf_file(wide, tmp_path, name):
    """Also of types that no layout of integers holds, and of rows that rotary embedding reorders."""
    first = export(wide, tmp_path / "a.gguf", settings(type=name, imatrix="none"))
    again = export(first, tmp_path / "b.gguf", settings())
    old, new = container.read_gguf(tmp_path / "a.gguf"), container.read_gguf(tmp_path / "b.gguf")
    assert {tensor.kind for tensor in old.tensors.values()} == {
        tensor.kind for tensor in new.tensors.values()
    }
    assert all(torch.equal(new.load(tensor), old.load(tensor)) for tensor in old.tensors)
    assert again.card.details["carried"] == 16 and not again.card.details["notes"]


@pytest.fixture
def sweeps(monkeypatch):
    """How many tokens each computed importance matrix was made of."""
    from attar.deployment import imatrix

    compute, tokens = imatrix.compute, []

    def counted(checkpoint, batches, **more):
        tokens.append(sum(batch.numel() for batch in batches))
        return compute(checkpoint, batches, **more)

    monkeypatch.setattr(imatrix, "compute", counted)
    return tokens


@pytest.mark.slow
def test_few_bits_are_rounded_with_an_importance_matrix_unasked(wide, tmp_path, sweeps, monkeypatch):
    monkeypatch.setattr("attar.deployment.settings.AUTO_ROWS", 4)
    exported = export(wide, tmp_path / "auto", settings(type="Q4_K_S", imatrix="auto", **CALIBRATION))
    assert sweeps == [4 * 32] and exported.card.details["importance"] == "128 tokens of python-docs"
    assert [text["tokens"] for text in exported.card.details["text"]] == [128]
    readme = (tmp_path / "auto" / "README.md").read_text()
    assert "| importance matrix | 128 tokens of python-docs |" in readme
    few = CALIBRATION | {"samples": 4}
    asked = export(wide, tmp_path / "asked", settings(type="Q4_K_S", imatrix="compute", **few))
    plain = export(wide, tmp_path / "plain", settings(type="Q4_K_S", imatrix="none", **CALIBRATION))
    assert all(torch.equal(exported.load(name), asked.load(name)) for name in exported.tensors)
    assert any(not torch.equal(exported.load(name), plain.load(name)) for name in exported.tensors)
    assert plain.card.details["importance"] == "" and "text" not in plain.card.details


@pytest.mark.slow
def test_no_text_is_read_where_it_would_not_help(wide, tmp_path, sweeps):
    for name in ("Q8_0", "BF16", "auto"):
        exported = export(wide, tmp_path / f"{name}.gguf", settings(type=name, imatrix="auto"))
        assert not exported.card.details["importance"]
    assert not sweeps


@pytest.mark.slow
def test_without_text_an_export_is_plain_and_says_so(wide, tmp_path, monkeypatch):
    def nothing(*_, **__):
        raise DataError("no text on this machine")

    monkeypatch.setattr("attar.deployment.stage.record", nothing)
    messages = []
    progress = type("Told", (type(SILENT),), {"log": lambda self, line: messages.append(line)})()
    exported = export(wide, tmp_path / "a.gguf", settings(type="Q4_0", imatrix="auto"), progress=progress)
    assert not exported.card.details["importance"]
    assert any("no text on this machine" in line for line in messages)
    with pytest.raises(DataError, match="no text"):
        export(wide, tmp_path / "b.gguf", settings(type="Q4_0", imatrix="compute"))
    with pytest.raises(DataError, match="no text"):
        export(wide, tmp_path / "b.gguf", settings(type="Q4_0", rounding="gptq"))


@pytest.mark.slow
def test_a_quantized_checkpoint_has_an_importance_matrix_too(tmp_path, sweeps):
    """Its decoded weights run over the text."""
    packed = pack(save(tmp_path / "dense", hidden_size=256), tmp_path / "packed", scheme="W8A16")[1]
    exported = export(packed, tmp_path / "a.gguf", settings(type="Q4_0", imatrix="auto", **CALIBRATION))
    assert sweeps == [8 * 32] and exported.card.details["importance"]


def test_blocks_that_the_gguf_library_decodes_otherwise_are_noticed(wide, tmp_path, monkeypatch):
    monkeypatch.setattr("gguf.quants.dequantize", lambda data, kind: dequantize(data, kind) * 1.0001)
    with pytest.raises(NumericsError, match="decodes Q8_0 differently"):
        export(wide, tmp_path / "a.gguf", settings(type="Q8_0"))
    assert not (tmp_path / "a.gguf").exists()


def test_tokenizer_and_header_are_gone_through_once(wide, tmp_path, monkeypatch):
    """They are most of a small file's export time besides its weights."""
    from attar.deployment import gguf
    from attar.formats.gguf import writer

    calls = []
    for module, name in ((gguf, "read_tokenizer_files"), (writer, "_head")):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, f=function, name=name: (calls.append(name), f(*given))[1]
        )
    export(wide, tmp_path / "a.gguf", settings(type="Q8_0"))
    assert sorted(calls) == ["_head", "read_tokenizer_files"]


def test_importance_and_blocks_follow_inputs_that_the_file_has_in_another_order(tmp_path):
    """Qwen3.5's output projection behind tiled heads of values: importance goes with its input, and a file in
    blocks, whose codes no other layout takes over, is read back in the checkpoint's order."""
    folder = tiny_models.save(tiny_models.build("qwen3_5"), tmp_path / "model")
    source = open_checkpoint(folder)
    placed = {item.gguf: item for item in placements(source.config, source.tensors)}
    output = placed["blk.0.ssm_out.weight"]
    totals = torch.rand(output.shape[1])
    entry = importance_entries({output.stored: (totals, 3.0)}, [output])[output.gguf]
    assert torch.equal(entry.in_sum2, output.apply(totals[None])[0]) and not torch.equal(
        entry.in_sum2, totals
    )
    export(folder, tmp_path / "out.gguf", settings(type="Q8_0"))
    opened = reader(open_checkpoint(tmp_path / "out.gguf"))
    weight, decoded = source.load(output.stored), opened.decode(output.gguf)
    assert (decoded - weight).abs().max() <= weight.abs().max() / 127
    assert opened.codes(output.gguf) is None and opened.codes("blk.0.attn_gate.weight") is not None
    assert opened.same_blocks(output) == output.piece
    assert opened.same_blocks(replace(output, columns=None)) is None


def test_a_scale_of_the_model_has_no_room_for_one_of_nvfp4(tmp_path):
    changes = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 64}
    folder = tiny_models.save(tiny_models.build("gemma4", **changes), tmp_path / "model")
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down_exps\.weight cannot be NVFP4"):
        export(folder, tmp_path / "out.gguf", settings(type="NVFP4"))
    assert not (tmp_path / "out.gguf").exists()
