"""What README and docs say works is held by a test or by a command of the repository.

``claims.yaml`` has document → section → words of the document → what holds them: tests
(``tests/FILE.py::NAME``) or commands (``python SCRIPT --option``, ``attar VERB --option``, ``make TARGET``).
Who changes a sentence finds there which test to look at; who adds a section, a row of README's table, a
strong word (STRONG) or a table of figures is asked here what holds it.
docs/settings.md is generated, and held by test_docs.py; docs/index.md has links alone.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from attar.cli.main import VERBS
from attar.formats.gguf.families import ARCHITECTURES
from attar.merging.methods import METHODS
from attar.recipe.stages import load

ROOT = Path(__file__).parents[1]
CLAIMS = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text())
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]
PAGES = [page for page in PAGES if page not in ("docs/settings.md", "docs/index.md")]
STRONG = r"bit for bit|byte for byte|same bytes|do not load|\b(resumes?|loads? (with|in)|never|exact(ly)?)\b"
COMMAND = r"(?:python (?:benchmarks|scripts)/|attar (?=[a-z])|make )"


def plain(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


@cache
def sections(page: str) -> dict[str, str]:
    """Title of each section (headings of every level) to its text, without the sections inside it."""
    parts: dict[str, str] = {}
    title, fenced = "", False
    for line in (ROOT / page).read_text().splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (heading := re.match(r"#{1,3} (.*)", line)):
            title = heading[1]
            assert title not in parts, f"{page} has two sections {title!r}"
            parts[title] = ""
        else:
            parts[title] += line + "\n"
    return {title: text for title, text in parts.items() if text.strip()}


def claimed(page: str, title: str) -> list[str]:
    """The words of a section that something holds."""
    return [plain(words) for words in CLAIMS.get(page, {}).get(title, {})]


def commands(text: str) -> list[str]:
    """Command lines of a text: indented blocks and code in a sentence."""
    whole = text.replace("\\\n", " ")
    return [
        *re.findall(rf"^ {{4}}({COMMAND}.*)$", whole, flags=re.M),
        *re.findall(rf"`({COMMAND}[^`]*)`", plain(re.sub(r"^```.*?^```", "", whole, flags=re.M | re.S))),
    ]


@cache
def options(script: str) -> set[str]:
    """Options that a script takes: texts with two dashes in it and in neighbours that it imports, or names as
    "module:function"; every name in it where it makes options out of names."""
    tree = ast.parse((ROOT / script).read_text())
    names = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    actual = {name for name in names if name.startswith("--")}
    if "--" in names:
        actual |= {f"--{name.replace('_', '-')}" for name in names if name.isidentifier()}
    for node in ast.walk(tree):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.Constant) and re.fullmatch(r"\w+:\w+", str(node.value)):
            modules.append(str(node.value).partition(":")[0])
        for module in modules:
            neighbour = f"{Path(script).parent}/{module}.py"
            if (ROOT / neighbour).is_file():
                actual |= options(neighbour)
    return actual | {"--help"}


@cache
def options_of_verb(verb: str) -> set[str]:
    """Options of ``attar VERB``."""
    assert verb in VERBS, f"attar has no verb {verb!r}"
    command = load(VERBS[verb][1])(verb)
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def check_command(line: str) -> None:
    """The script, verb or target exists, and takes the options."""
    program, what, *_ = line.split()
    if program == "make":
        assert re.search(rf"^{what}:", (ROOT / "Makefile").read_text(), flags=re.M), line
        return
    if program == "python":
        assert (ROOT / what).is_file(), line
    known = options(what) if program == "python" else options_of_verb(what)
    for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", line.partition("  #")[0]):
        assert option in known, f"{line}: no option {option}"


def check_test(name: str) -> None:
    """The file has a test of this name."""
    file, _, test = name.partition("::")
    assert (ROOT / file).is_file(), name
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), flags=re.M), name


@pytest.mark.parametrize("page", CLAIMS)
def test_claims_stand_in_their_section_and_are_held(page):
    for title, claims in CLAIMS[page].items():
        assert title in sections(page), f"{page} has no section {title!r}"
        text = plain(sections(page)[title])
        for words, held in claims.items():
            assert plain(words) in text, f"{page}, {title}: {words!r} is not there any more"
            assert held, f"{page}, {title}: nothing holds {words!r}"
            for name in held:
                check_test(name) if name.startswith("tests/") else check_command(name)


@pytest.mark.parametrize("page", PAGES)
def test_every_section_has_a_claim(page):
    for title in sections(page):
        assert claimed(page, title), f"{page}: what holds the section {title!r}? See tests/claims.yaml"


def test_every_row_of_what_works_has_a_claim():
    page, title = "docs/features.md", "What attar does"
    for row in re.findall(r"^\| [a-z].*$", sections(page)[title], flags=re.M):
        assert any(words in plain(row) for words in claimed(page, title)), row


def test_every_cell_of_the_apis_has_a_claim():
    page, title = "docs/apis.md", "Features by API"
    rows = re.findall(r"^\| (?!feature).*$", sections(page)[title], flags=re.M)
    cells = {cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]}
    assert sorted(cells - {""} - set(claimed(page, title))) == []


@pytest.mark.parametrize("page", PAGES)
def test_strong_words_have_a_claim_in_their_paragraph(page):
    for title, text in sections(page).items():
        for paragraph in map(plain, text.split("\n\n")):
            if strong := re.search(STRONG, paragraph):
                held = any(words in paragraph for words in claimed(page, title))
                assert held, f"{page}, {title}: what holds {strong[0]!r} in {paragraph[:200]!r}?"


@pytest.mark.parametrize("page", PAGES)
def test_a_table_of_figures_has_its_command(page):
    for title, text in sections(page).items():
        figures = re.findall(r"^\|(?:[^|\n]*\|)*?(?:[ *~±<>]*[\d.,]+[^|\n]*\|){3}", text, flags=re.M)
        assert not figures or commands(text), f"{page}, {title}: which command prints {figures[0]!r}?"


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_documents_exist(page):
    for line in commands((ROOT / page).read_text()):
        check_command(line)


def test_counts_in_documents_are_those_of_the_tables():
    listed = re.findall(r"\*\*Families\.\*\* (.*?);", sections("docs/export.md")["GGUF"], flags=re.S)[0]
    assert set(listed.replace("gemma3 (text)", "gemma3_text").split(", ")) == set(ARCHITECTURES)
    assert f"{len(ARCHITECTURES)} families" in sections("docs/features.md")["What attar does"]
    assert f"{len(METHODS)} methods" in sections("docs/features.md")["What attar does"]
