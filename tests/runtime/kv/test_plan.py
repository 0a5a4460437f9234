"""What a cache takes and what fits: known sizes, the edge of a budget, windows; the verb that shows it."""

import json

import pytest

from attar.cli.main import call
from attar.errors import CheckpointError, SettingsError
from attar.runtime.kv.layout import KV_FORMATS, cache_bytes, layer_shapes
from attar.runtime.kv.plan import config_of, longest, plan_kv, shown

LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}
LAYERS = layer_shapes(LLAMA_3_8B)


def test_every_context_with_every_batch_in_every_format():
    made = plan_kv(LAYERS, contexts=[1024, 8192], batches=[1, 4])
    assert len(made.cells) == 2 * 2 * len(KV_FORMATS) and made.rooms == ()
    sizes = {(cell.kv_dtype, cell.context, cell.batch): cell.bytes for cell in made.cells}
    assert sizes["bfloat16", 8192, 1] == 2**30 and sizes["bfloat16", 8192, 4] == 4 * 2**30
    assert sizes["int8", 1024, 4] == cache_bytes(LAYERS, "int8", 1024, 4, 32)
    assert made.token_bytes["bfloat16"] == 131_072 and made.token_bytes["kivi4"] == 32 * 2 * 8 * (64 + 16)
    assert {cell.fits for cell in made.cells} == {None}


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_longest_context_fits_and_a_block_more_does_not(name, batch):
    budget = 123_456_789
    made = plan_kv(LAYERS, contexts=[512], batches=[batch], kv_dtypes=[name], budget=budget)
    (room,) = made.rooms
    assert cache_bytes(LAYERS, name, room.context, batch, 32) <= budget
    assert cache_bytes(LAYERS, name, room.context + 1, batch, 32) > budget
    assert made.cells[0].fits == (room.context >= 512)


def test_windows_in_every_layer_make_any_length_fit():
    mistral = layer_shapes({**LLAMA_3_8B, "sliding_window": 4096})
    need = cache_bytes(mistral, "bfloat16", 10**6, 1, 32)
    assert longest(mistral, "bfloat16", 1, need, 32) is None
    assert longest(mistral, "bfloat16", 1, need - 1, 32) == 4096
    assert longest(LAYERS, "bfloat16", 1, 0, 32) == 0
    head, rows = shown(plan_kv(mistral, contexts=[9999], batches=[1], kv_dtypes=["int8"], budget=need))
    assert head[-1] == "longest x 1" and rows[0][-1] == "any"


@pytest.mark.parametrize("changes", [{"contexts": [0]}, {"batches": [0]}, {"block_size": 0}, {"budget": -1}])
def test_sizes_below_one_are_refused(changes):
    with pytest.raises(SettingsError, match="at least 1"):
        plan_kv(LAYERS, **{"contexts": [1], "batches": [1], **changes})


def test_a_config_alone_is_enough(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_8B))
    assert config_of(file) == config_of(tmp_path) == LLAMA_3_8B
    assert config_of("attar:tiny")["num_hidden_layers"] == 8
    with pytest.raises(CheckpointError):
        config_of(tmp_path / "none.json")


def test_the_verb(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert call(["plan-kv", str(tmp_path), "--budget", "1GiB", "--dtype", "bfloat16", "--dtype", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "32 layers, 8 kv heads of 128: 131,072 bytes a token in bfloat16"
    wide = "bfloat16  131,072  128.0 MiB  1.00 GiB  512.0 MiB  4.00 GiB !  1.00 GiB  8.00 GiB !  8,192  1,024"
    assert lines[3].split() == wide.split()
    assert lines[-1] == "! more than the budget"
    assert call(["plan-kv", str(tmp_path), "--context", "4096", "--batch", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["kv_dtype"]: cell["bytes"] for cell in found["cells"]}["float16"] == 2**30
    for wrong, words in ((["--dtype", "kivi5"], "did you mean"), (["--batch", "x"], "whole number")):
        assert call(["plan-kv", str(tmp_path), *wrong]) != 0
        assert words in capsys.readouterr().err
