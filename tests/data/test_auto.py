"""Which text is calibrated on where none is named."""

from types import SimpleNamespace

import pytest

from attar.checkpoint import open_checkpoint
from attar.checkpoint.card import Card, Parent
from attar.data.auto import fit, fitting
from attar.pruning.settings import prune_settings
from attar.recipe.plan import fitted
from attar.recipe.schema import parse_recipe
from tests import tiny_models
from tests.log_lines import LogLines


def model(tmp_path, name="model", **more):
    card = more.pop("card", None)
    return SimpleNamespace(path=tmp_path, name=name, config=more, card=card)


@pytest.mark.parametrize(
    "name",
    [
        "starcoder2-3b",
        "org/Qwen2.5-Coder-7B@main",
        "CodeLlama-7b",
        "codegen-350M",
        "deepseek-coder",
        "codestral",
    ],
)
def test_a_model_of_code_by_its_name(tmp_path, name):
    assert fitting(model(tmp_path, name))[0] == "python-stdlib"
    assert fitting(model(tmp_path, "w4", _name_or_path=f"/models/{name}/"))[0] == "python-stdlib"
    card = Card(name="w4", stage="quantize", parents=(Parent(role="weights", name=name, stage="original"),))
    assert fitting(model(tmp_path, "w4", card=card))[0] == "python-stdlib"


@pytest.mark.parametrize(
    "name", ["bert-encoder", "decoder-only", "encodec", "llama", "code-org/llama", "transcoder"]
)
def test_no_model_of_code(tmp_path, name):
    assert fitting(model(tmp_path, name))[0] == "python-docs"


def test_a_chat_template_means_conversations(tmp_path):
    folder = tiny_models.save(tiny_models.build("smollm"), tmp_path / "chatty")
    assert fitting(open_checkpoint(folder))[0] == "python-docs"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert fitting(open_checkpoint(folder))[0] == "python-docs-chat"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert fitting(open_checkpoint(folder))[0] == "python-docs-chat"


def test_the_embedded_models_keep_their_text():
    for name in ("attar:tiny", "attar:draft", "attar:head"):
        assert fitting(open_checkpoint(name)) == ("python-stdlib", f"{name} was trained on it")


def test_the_choice_is_reported_and_the_wrong_kind_is_warned_of(tmp_path):
    messages, prose = LogLines(), model(tmp_path)
    assert fit(prune_settings(), prose, messages).data == "python-docs"
    assert fit(prune_settings(data="mine.txt"), prose, messages).data == "mine.txt"
    assert fit(prune_settings(data="python-stdlib"), prose, messages).data == "python-stdlib"
    assert [line.split()[0] for line in messages.lines] == ["text:", "warning:"]
    assert "python-docs, because" in messages.lines[0] and "python-docs fits better" in messages.lines[1]
    assert "magpie" not in messages.lines[0], "an encoder writes nothing"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert fit(prune_settings(), prose, messages).data == "python-docs-chat"
    assert "attar collect magpie" in messages.lines[-1]


def test_a_recipe_fits_its_text_to_its_model_before_any_key_is_made():
    text = "model: attar:tiny\n{}evaluate: {{tokens: 64}}\nstages: [{{stage: prune}}, {{stage: quantize}}]\n"
    tiny = open_checkpoint("attar:tiny")
    auto, named = (fitted(parse_recipe(text.format(data)), tiny) for data in ("", "data: python-stdlib\n"))
    assert auto.to_dict() == named.to_dict()
    assert {auto.data, auto.evaluate.data, *(entry.settings.data for entry in auto.stages)} == {
        "python-stdlib"
    }
