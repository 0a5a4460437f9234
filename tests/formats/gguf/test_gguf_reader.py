"""GGUF files as checkpoints: what goes in comes out, and each kind of fault is named."""

from __future__ import annotations

import json
import random
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from attar.checkpoint.card import Card
from attar.checkpoint.companions import tokenizer_files
from attar.checkpoint.open import open_checkpoint
from attar.errors import CheckpointError, ModelError, NumericsError, OutputError
from attar.formats.gguf.codes import with_positive_scales
from attar.formats.gguf.container import GGUFTensorInfo, GGUFWriter, TypedValue, read_gguf
from attar.formats.readers import Decoded, reader
from attar.formats.rules import WeightRule
from attar.models.loading.load import load_model
from tests import tiny_models
from tests.formats.gguf.gguf_files import HALVES, random_blocks, write_gguf
from tests.formats.gguf.making import typed

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
Q = "blk.0.attn_q.weight"
STORED_Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ATTAR_CACHE", str(folder))
    return folder


def saved(folder: Path, family: str = "smollm", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    return tiny_models.save(tiny_models.build(family, **changes), folder, dtype=dtype)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose widths every block divides."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return saved(tmp_path_factory.mktemp("model") / "m", **sizes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family", ["llama2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"]
)
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    source = open_checkpoint(saved(tmp_path / "m", family))
    opened = open_checkpoint(write_gguf(source, tmp_path / "m.gguf", "BF16"))
    view = Decoded(opened)
    assert sorted(view.tensors) == sorted(source.tensors)
    for name, info in source.tensors.items():
        assert (view.tensors[name].dtype, view.tensors[name].shape) == ("BF16", info.shape), name
        assert torch.equal(view.load(name), source.load(name)), name
    before, after = load_model(source, dtype=torch.float32), load_model(opened, dtype=torch.float32)
    rows = tiny_models.tokens(before)
    assert torch.equal(tiny_models.logits(before, rows), tiny_models.logits(after, rows))
    assert load_model(opened).dtype == torch.bfloat16


def test_what_only_gguf_has_stands_for_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama3", rope_parameters=LLAMA3_ROPE)
    opened = open_checkpoint(write_gguf(source, tmp_path / "m.gguf"))
    actual = reader(opened)
    assert "rope_freqs.weight" in opened.tensors
    assert (
        actual.header(opened.tensors["rope_freqs.weight"]) is None
        and actual.decode("rope_freqs.weight") is None
    )
    actual.check("rope_freqs.weight")
    before, after = load_model(source, dtype=torch.float32), load_model(opened, dtype=torch.float32)
    rows = tiny_models.tokens(before, length=100)
    assert torch.allclose(tiny_models.logits(before, rows), tiny_models.logits(after, rows), atol=2e-3)


def unpaired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads from neighbouring pairs back to halves, row by row."""
    width, result = tensor.shape[0] // heads, torch.empty_like(tensor)
    for head in range(heads):
        for index in range(width):
            pair, second = divmod(index, 2)
            result[head * width + second * (width // 2) + pair] = tensor[head * width + index]
    return result


def with_blocks(model: Path, path: Path, kind: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A file whose first q and down projections are random blocks; the checkpoint and what they decode to."""
    q, down = random_blocks(kind, (256, 256)), random_blocks(kind, (256, 256), seed=1)
    replace = {Q: (kind, q), "blk.1.ffn_down.weight": (kind, down)}
    opened = open_checkpoint(write_gguf(model, path, "BF16", replace=replace))
    peer = [torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind])) for data in (q, down)]
    return opened, unpaired(peer[0], 8), peer[1]


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", HALVES)
def test_blocks_decode_as_the_gguf_library_has_it(tmp_path: Path, model: Path, kind: str) -> None:
    opened, q, down = with_blocks(model, tmp_path / "m.gguf", kind)
    info, actual = opened.tensors[Q], reader(opened)
    assert (info.dtype, info.shape, info.block) == ("U8", (256, info.nbytes // 256), kind)
    assert actual.header(info) == (STORED_Q, "F32", (256, 256)) and opened.config["dtype"] == "float32"
    assert torch.equal(actual.decode(Q), q)
    assert torch.equal(actual.decode("blk.1.ffn_down.weight"), down)
    actual.check(Q)
    assert torch.equal(load_model(opened).get_parameter(STORED_Q), q)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q5_0", 5), ("Q8_0", 8), ("MXFP4", 4)])
def test_codes_are_those_of_the_file(tmp_path: Path, model: Path, kind: str, bits: int) -> None:
    opened, q, down = with_blocks(model, tmp_path / "m.gguf", kind)
    for name, dense in ((Q, q), ("blk.1.ffn_down.weight", down)):
        weight, rule = reader(opened).codes(name)
        assert rule == WeightRule("float" if kind == "MXFP4" else "int", bits, "group", 32)
        assert weight.zero is None and weight.scale.shape == (256, 8)
        if kind == "MXFP4":
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            levels = values[weight.codes.int()]
        else:
            assert (
                int(weight.codes.min()) == -(2 ** (bits - 1))
                and int(weight.codes.max()) == 2 ** (bits - 1) - 1
            )
            levels = weight.codes.float()
        assert torch.equal(levels * weight.scale.repeat_interleave(32, 1), dense)
    assert reader(opened).codes("blk.0.attn_k.weight") is None
    assert reader(opened).codes("output_norm.weight") is None


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 4), ("Q5_1", 5)])
def test_minimums_that_are_zero_points(tmp_path: Path, model: Path, kind: str, bits: int) -> None:
    opened, _, _ = with_blocks(model, tmp_path / "random.gguf", kind)
    assert reader(opened).codes(Q) is None  # d and m are unrelated
    blocks = random_blocks(kind, (256, 256)).view(-1, 20 + 4 * (bits - 4))
    zero = torch.arange(len(blocks)) % 2**bits
    scale = torch.full((len(blocks), 1), 0.0625).half()
    scale[5] = 0  # a block of zeros
    minimum = (-scale.float() * zero[:, None]).half()
    blocks[:, :2], blocks[:, 2:4] = scale.view(torch.uint8), minimum.view(torch.uint8)
    replace = {Q: (kind, blocks.view(256, -1))}
    opened = open_checkpoint(write_gguf(model, tmp_path / "m.gguf", "BF16", replace=replace))
    weight, rule = reader(opened).codes(Q)
    assert rule == WeightRule("int", bits, "group", 32, symmetric=False)
    assert weight.zero.min() == -(2 ** (bits - 1)) and weight.zero.max() == 2 ** (bits - 1) - 1
    values = (weight.codes - weight.zero.repeat_interleave(32, 1)) * weight.scale.repeat_interleave(32, 1)
    assert torch.equal(values, reader(opened).decode(Q))
    spoilt = blocks.clone()
    spoilt[7, 2:4] = torch.tensor([0.001]).half().view(torch.uint8)
    replace = {Q: (kind, spoilt.view(256, -1))}
    opened = open_checkpoint(write_gguf(model, tmp_path / "n.gguf", "BF16", replace=replace))
    assert reader(opened).codes(Q) is None


def decoded(weight: Any) -> torch.Tensor:
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    return (weight.codes - zero.repeat_interleave(32, 1)) * weight.scale.repeat_interleave(32, 1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_negative_scales_can_be_turned(tmp_path: Path, model: Path, kind: str) -> None:
    opened, q, _ = with_blocks(model, tmp_path / "m.gguf", kind)
    weight, rule = reader(opened).codes(Q)
    assert (weight.scale < 0).any()
    turned, new_rule = with_positive_scales(weight, rule)
    assert (turned.scale >= 0).all() and not new_rule.symmetric and turned.codes.dtype == torch.int8
    assert torch.equal(decoded(turned), q) and torch.equal(decoded(weight), q)
    again, last = with_positive_scales(turned, new_rule)
    assert again is turned and last is new_rule
    low = -(2 ** (rule.bits - 1))
    tame = type(weight)(weight.codes.clamp(min=low + 1), weight.scale)
    turned, new_rule = with_positive_scales(tame, rule)
    assert new_rule == rule and turned.zero is None and torch.equal(decoded(turned), decoded(tame))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K", "IQ4_NL", "F16"])
def test_types_without_codes_of_their_own(tmp_path: Path, model: Path, kind: str) -> None:
    if kind == "F16":
        opened = open_checkpoint(write_gguf(model, tmp_path / "m.gguf"))
    else:
        opened, _, _ = with_blocks(model, tmp_path / "m.gguf", kind)
    assert reader(opened).codes(Q) is None


def test_vectors_keep_every_bit(tmp_path: Path, model: Path) -> None:
    norm = torch.full((256,), 1.0 + 2**-12)
    plain = open_checkpoint(write_gguf(model, tmp_path / "a.gguf", "BF16"))
    odd = open_checkpoint(
        write_gguf(model, tmp_path / "b.gguf", "BF16", replace={"output_norm.weight": ("F32", norm)})
    )
    half = open_checkpoint(write_gguf(model, tmp_path / "c.gguf", "F16"))
    slots = [reader(opened).header(opened.tensors["output_norm.weight"]) for opened in (plain, odd, half)]
    assert [slot[1] for slot in slots] == ["BF16", "F32", "F16"]
    assert reader(plain).header(plain.tensors[Q])[1] == reader(odd).header(odd.tensors[Q])[1] == "BF16"
    assert torch.equal(reader(odd).decode("output_norm.weight"), norm)


def test_numbers_that_are_none_are_refused(tmp_path: Path, model: Path) -> None:
    blocks = random_blocks("Q4_K", (256, 256))
    blocks[3, :2] = torch.tensor([torch.nan]).half().view(torch.uint8)
    norm = torch.ones(256)
    norm[3] = torch.inf
    replace = {Q: ("Q4_K", blocks), "output_norm.weight": ("F32", norm)}
    actual = reader(open_checkpoint(write_gguf(model, tmp_path / "m.gguf", "BF16", replace=replace)))
    actual.check("blk.0.attn_k.weight")
    with pytest.raises(NumericsError, match=r"blk\.0\.attn_q\.weight: d of Q4_K is NaN or infinite"):
        actual.check(Q)
    with pytest.raises(NumericsError, match=r"'output_norm\.weight' contains NaN or infinity"):
        actual.check("output_norm.weight")


def test_the_folder_in_the_cache(tmp_path: Path, model: Path, cache: Path) -> None:
    file = write_gguf(model, tmp_path / "m.gguf", "Q8_0", extra={"general.license": "apache-2.0"})
    opened = open_checkpoint(file)
    assert opened.path.parent.parent == cache / "gguf" and opened.path.name == "m.gguf"
    assert opened.source == file and opened.name == "m" and opened.weight_files == [file]
    assert json.loads((opened.path / "config.json").read_text()) == opened.config
    assert opened.config["quantization_config"] == {"quant_method": "gguf"}
    assert opened.config["license"] == "apache-2.0"
    result = (opened.path / "config.json").stat().st_mtime_ns
    assert open_checkpoint(file).path == opened.path
    assert (opened.path / "config.json").stat().st_mtime_ns == result
    first = opened.fingerprint()
    assert first == open_checkpoint(file).fingerprint()
    write_gguf(model, file, "Q8_0", extra={"general.name": "another"})
    changed = open_checkpoint(file)
    assert changed.path != opened.path and changed.fingerprint() != first
    assert sorted(path.name for path in (cache / "gguf").iterdir()) == sorted(
        checkpoint.path.parent.name for checkpoint in (opened, changed)
    )


def test_without_attar_cache_the_usual_one_is_taken(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (tmp_path / "xdg" / "attar" / "gguf") in open_checkpoint(
        write_gguf(model, tmp_path / "m.gguf")
    ).path.parents


def test_a_cache_that_cannot_be_written(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(model, tmp_path / "m.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="cannot be written") as caught:
        open_checkpoint(file)
    assert "ATTAR_CACHE" in str(caught.value.hint)


def test_the_tokenizer_is_made_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, calls = types.ModuleType("attar.formats.gguf.tokenizer.from_gguf"), []

    def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
        calls.append(metadata["tokenizer.ggml.tokens"])
        (folder / "tokenizer.json").write_text("{}")
        if calls[-1] == ["odd"]:
            raise ModelError("of an unknown kind", hint="no")

    stand_in.write_tokenizer = write_tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attar.formats.gguf.tokenizer.from_gguf", stand_in)
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    file = write_gguf(model, tmp_path / "m.gguf", extra=keys)
    assert tokenizer_files(open_checkpoint(file).path) == ["tokenizer.json"]
    assert open_checkpoint(file).fingerprint() and calls == [["a", "b"]]
    write_gguf(model, file, extra={**keys, "tokenizer.ggml.tokens": ["odd"]})
    with pytest.raises(ModelError, match=r"m\.gguf: of an unknown kind"):
        open_checkpoint(file)
    assert len(list(open_checkpoint(write_gguf(model, file)).path.parent.parent.iterdir())) == 2


def test_split_files_and_folders(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    first = write_gguf(model, folder / "m.gguf", "Q8_0", max_bytes=300_000)
    parts = sorted(folder.iterdir())
    assert len(parts) > 2 and first == parts[0]
    opened = [open_checkpoint(index) for index in (folder, first, parts[-1], str(parts[1]))]
    assert {one.path for one in opened} == {opened[0].path} and opened[0].name == "m"
    assert opened[0].weight_files == parts and opened[0].source == first
    whole = open_checkpoint(write_gguf(model, tmp_path / "m.gguf", "Q8_0"))
    assert torch.equal(reader(opened[0]).decode(Q), reader(whole).decode(Q))
    writer = GGUFWriter(
        folder / "imatrix.gguf", {"general.type": "imatrix"}, [GGUFTensorInfo("x.in_sum2", "F32", (4,))]
    )
    writer.add("x.in_sum2", torch.zeros(4))
    writer.finish()
    assert open_checkpoint(folder).path == opened[0].path
    with pytest.raises(
        CheckpointError, match=r"imatrix\.gguf: is a GGUF file of the type 'imatrix', not a model"
    ):
        open_checkpoint(folder / "imatrix.gguf")
    shutil.copy(tmp_path / "m.gguf", folder / "other.gguf")
    with pytest.raises(CheckpointError, match="parts: 2 GGUF models"):
        open_checkpoint(folder)


def test_the_card_of_a_file(tmp_path: Path, model: Path) -> None:
    file = write_gguf(model, tmp_path / "m.gguf")
    card = Card(name="m", stage="export", files={"other.gguf": "0"})
    card.write(tmp_path)
    assert open_checkpoint(file).card is None
    Card(name="m", stage="export", files={"m.gguf": "0"}).write(tmp_path)
    assert open_checkpoint(file).card.stage == "export"
    (tmp_path / "attar.json").rename(tmp_path / "m.attar.json")
    assert open_checkpoint(file).card.files == {"m.gguf": "0"}


def rewritten(file: Path, **changes: Any) -> Path:
    """The same tensors under other metadata; keys are written with two underscores for a dot."""
    opened = read_gguf(file)
    keys = typed(opened) | {key.replace("__", "."): value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    slots = [GGUFTensorInfo(tensor.name, tensor.kind, tensor.shape) for tensor in opened.tensors.values()]
    data = {name: opened.load(name) for name in opened.tensors}
    writer = GGUFWriter(file, keys, slots)
    for name, tensor in data.items():
        writer.add(name, tensor)
    return writer.finish()[0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general__architecture": None}, CheckpointError, "has no general.architecture"),
        ({"general__architecture": "mamba"}, ModelError, "attar cannot read GGUF's architecture 'mamba'"),
        ({"general__type": "adapter"}, CheckpointError, "of the type 'adapter', not a model"),
        ({"llama__block_count": 10**9}, CheckpointError, "block_count is 1000000000, but it has 20 tensors"),
        ({"llama__attention__head_count": 10**9}, CheckpointError, "head_count is 1000000000: no tensor"),
        ({"llama__embedding_length": 10**9}, CheckpointError, "embedding_length is 1000000000: no tensor"),
        (
            {"llama__attention__head_count": TypedValue("u32", 0)},
            CheckpointError,
            "make no sense|head_count is 0",
        ),
        ({"llama__embedding_length": "wide"}, CheckpointError, "its metadata make no sense"),
        ({"llama__block_count": None}, CheckpointError, "llama.block_count is missing"),
    ],
)
def test_metadata_that_make_no_model(
    tmp_path: Path, model: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    file = rewritten(write_gguf(model, tmp_path / "m.gguf"), **changes)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(file)
    assert str(caught.value).startswith(str(file))


def test_tensors_that_make_no_model(tmp_path: Path, model: Path) -> None:
    file = write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*no tensor 'blk\.2\.attn_q\.weight'"):
        reader(open_checkpoint(rewritten(file, llama__block_count=3)))
    with pytest.raises(CheckpointError, match=r"'blk.1.attn_q.weight' has no place"):
        reader(open_checkpoint(rewritten(file, llama__block_count=1)))
    with pytest.raises(
        CheckpointError, match=r"'blk.0.ffn_gate.weight' is \[256, 256\], but must be \[99, 256\]"
    ):
        reader(open_checkpoint(rewritten(file, llama__block_count=2, llama__feed_forward_length=99)))


def test_flipped_bytes_give_a_model_or_an_error(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "mistral", num_hidden_layers=1)
    data = write_gguf(source, tmp_path / "m.gguf").read_bytes()
    start = min(tensor.offset for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    draw, opened = random.Random(0), 0
    for number in range(200):
        changed = bytearray(data)
        changed[draw.randrange(start)] = draw.randrange(256)
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(changed)
        try:
            Decoded(open_checkpoint(file))
            opened += 1
        except (CheckpointError, ModelError) as error:
            assert str(error).startswith(str(file)), error
        file.unlink()
    assert 20 < opened < 180
