"""How a draft head is described."""

import dataclasses

import pytest

from attar.checkpoint.card import Card
from attar.checkpoint.inspect import inspect
from attar.checkpoint.readme import render_readme
from attar.errors import ModelError
from attar.models.draft_heads.folder import save_draft_head
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model, load_tokenizer
from attar.runtime.loading import load

REPORT = {"agreement": [0.75, 0.5], "acceptance": [0.625, 0.25]}


@pytest.fixture
def head(tmp_path):
    config = MedusaConfig(hidden=8, vocabulary=320, layers=(3,), drafts=2, draft_vocabulary=100)
    folder = tmp_path / "head"
    folder.mkdir()
    save_draft_head(MedusaHeads(config), folder, target="org/model")
    Card(name="head", stage="distill", details={"drafting": REPORT}).write(folder)
    return folder


def test_inspect_says_what_it_drafts_for_which_model_and_how_well(head):
    described = inspect(head)
    assert described.draft_head["kind"] == "medusa" and described.to_dict()["draft_head"]["drafts"] == 2
    text = described.render()
    for words in (
        "medusa, 2 drafts, for org/model",
        "the states behind layers 3, 8 wide",
        "100 of 320 tokens",
        "0.750, 0.500 at each position, greedy",
        "0.625, 0.250 at each position, at temperature 1",
    ):
        assert words in text
    assert "None" not in text


def test_its_readme_says_how_to_use_it(head):
    text = render_readme(Card.read(head), head)
    assert "attar generate org/model --draft head" in text and "attar serve org/model --draft head" in text
    assert "library_name: attar" in text
    for other in ("vllm", "from_pretrained", "text-generation"):
        assert other not in text


@pytest.mark.parametrize("use", [load_model, load_tokenizer, admit, load])
def test_where_a_model_is_wanted_a_head_is_refused_in_one_line(head, use):
    from attar.checkpoint.open import open_checkpoint

    with pytest.raises(ModelError, match="head is a draft head, and no model of its own") as caught:
        use(open_checkpoint(head))
    assert caught.value.hint == "it drafts for its model: attar generate org/model --draft head"
    assert "\n" not in caught.value.message


def test_a_model_has_no_draft_head(tmp_path):
    from tests import tiny_models

    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "model")
    assert inspect(folder).draft_head is None
    assert dataclasses.asdict(inspect(folder).geometry)["layers"] == 3
