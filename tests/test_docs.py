"""Documents that are generated are current; what they tell people to run exists."""

import re
from pathlib import Path

from attar.cli.main import VERBS
from scripts import document_settings

ROOT = Path(__file__).parents[1]


def test_table_of_merge_methods_is_current():
    assert document_settings.MERGE.read_text() == document_settings.merge_page(), (
        "run scripts/document_settings.py"
    )


def test_settings_page_is_current():
    assert document_settings.TARGET.read_text() == document_settings.page(), (
        "run scripts/document_settings.py"
    )


def test_types_of_the_public_names_are_current():
    assert document_settings.STUB.read_text() == document_settings.stub(), "run scripts/document_settings.py"


def test_settings_page_has_every_verb_and_whole_sentences():
    sections = re.findall(r"^## (.*)\n\n(.*)\n\n", document_settings.page(), flags=re.M)
    for verb in VERBS:
        assert any(re.search(rf"\b{verb}\b", title) for title, _ in sections), verb
    for title, sentence in sections:
        assert sentence.endswith("."), f"{title}: {sentence}"


def test_links_between_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_documents_name_only_verbs_that_exist():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = page.read_text()
        fenced = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, flags=re.M | re.S))
        verbs = re.findall(r"^    attar ([a-z-]+)", text, flags=re.M)
        for verb in verbs + re.findall(r"^attar ([a-z-]+)", fenced, flags=re.M):
            assert verb in VERBS, f"{page.name}: attar {verb}"


def test_the_map_is_short_and_its_files_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 120
    for name in re.findall(r"`([\w/]+\.(?:py|cpp))`", text):
        if "NAME" not in name and "/" in name and not name.startswith("tests/"):
            assert list(ROOT.glob(f"src/attar/**/{name}")), name


def test_the_functions_and_classes_that_the_map_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = "\n".join(path.read_text() for path in ROOT.glob("src/attar/**/*.py"))
    defined = {*re.findall(r"\b(?:class|def) (\w+)", source), *re.findall(r"\b(\w+) =", source)}
    for name in re.findall(r"`(?:\w+\.)*([A-Z][a-z]+[A-Z]\w+|[a-z]+_[a-z_]+)`", text):
        assert name in defined, name
