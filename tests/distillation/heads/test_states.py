"""Where the target's states of a batch come from: a pass, the cache, or both, with the same numbers."""

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.heads import states as module
from attar.distillation.heads.states import NumberedRows, StateCache, TargetStates, row_bytes
from attar.models.head import head_of
from attar.progress import SILENT
from tests import tiny_models

LAYERS = (1, 3)


@pytest.fixture
def rows():
    tokens = tiny_models.tokens(tiny_models.build("llama3"), batch=5, length=12)
    tokens[2, 7:] = PADDING
    return Examples.of_text(tokens)


def source(cache=None):
    model = tiny_models.build("llama3")
    return TargetStates(model, head_of(model), LAYERS, cache)


def test_equal_rows_have_the_same_number_and_numbers_name_the_different_rows(rows):
    repeated = rows[torch.tensor([3, 0, 1, 3, 2, 4, 0])]
    numbered, different = NumberedRows.of(repeated)
    assert len(different) == 5 and numbered.numbers[0] == numbered.numbers[3]
    assert torch.equal(different.tokens[numbered.numbers], repeated.tokens)
    assert torch.equal(different.targets[numbered.numbers], repeated.targets)
    batch = numbered[torch.tensor([4, 1])]
    assert torch.equal(batch.numbers, numbered.numbers[torch.tensor([4, 1])])


@pytest.mark.parametrize("kept", [1, 3, 5])
def test_a_cache_gives_the_numbers_of_a_pass(tmp_path, rows, kept, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 2)
    numbered, different = NumberedRows.of(rows)
    cached = source().cached(tmp_path, different, kept, 2, SILENT)
    assert cached.rows == kept and len(list(tmp_path.iterdir())) == -(-kept // 2)
    for order in ([0, 1, 2, 3, 4], [2], [4, 2]):
        batch = numbered[torch.tensor(order)]
        wanted, given = source().run(batch), cached.run(batch)
        real = given.batch.mask
        assert torch.equal(given.batch.tokens, wanted.batch.tokens)
        for one, other in ((given.states, wanted.states), (given.final, wanted.final)):
            assert one.dtype == torch.float32 and one.shape == other.shape
            assert torch.equal(one, one.bfloat16().float())
            torch.testing.assert_close(one[real], other[real], rtol=2**-7, atol=2**-7)
    assert given.states.shape[2:] == (2, 64)


def test_a_killed_cache_is_filled_where_it_stopped(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 2)
    _, different = NumberedRows.of(rows)
    source().cached(tmp_path, different, 5, 2, SILENT)
    whole = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    (tmp_path / "000001.safetensors").unlink()
    runs = []
    monkeypatch.setattr(module, "run_target", lambda *given: (runs.append(given), run(*given))[1])
    source().cached(tmp_path, different, 5, 2, SILENT)
    assert len(runs) == 1
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == whole


run = module.run_target


def test_the_bytes_of_a_row_are_those_on_disk(tmp_path, rows):
    _, different = NumberedRows.of(rows)
    source().cached(tmp_path, different, 4, 2, SILENT)
    with StateCache(tmp_path, 4)._file(0).open("rb") as file:
        header = int.from_bytes(file.read(8), "little") + 8
    size = (tmp_path / "000000.safetensors").stat().st_size - header
    assert size == 4 * row_bytes(12, len(LAYERS), 64)


def test_no_room_for_a_row_is_no_cache(tmp_path, rows):
    assert source().cached(tmp_path, rows, 0, 2, SILENT).rows == 0
