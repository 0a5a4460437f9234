"""The documentation's site builds and asks no other host for anything; notebooks do what their pages do."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import attar
from scripts import notebook, site_reference

ROOT = Path(__file__).parents[1]
MKDOCS = next(
    filter(None, (shutil.which("mkdocs", path=path) for path in (ROOT / ".venv-docs/bin", None))), None
)
TUTORIALS = sorted(page for page in ROOT.glob("docs/tutorials/*.md") if page.stem != "index")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\ssrc=[\"']?\s*(?:https?:)?//"
    r"|<link\b[^>]*?\shref=[\"']?\s*(?:https?:)?//"
    r"|<object\b[^>]*?\sdata=[\"']?\s*(?:https?:)?//"
    r"|\bsrcset=[\"'][^\"']*//"
    r"|url\(\s*[\"']?(?:https?:)?//"
    r"|@import\s+[\"'](?:https?:)?//"
    r"|data-md-component=[\"']?source\b"  # with it the theme asks GitHub how many stars there are
    r"|unpkg|jsdelivr|cdnjs|googleapis|gstatic|google-analytics",
    re.IGNORECASE,
)


def test_loads_from_elsewhere_are_seen():
    for wrong in (
        '<script async src="https://unpkg.com/a.js">',
        "<link rel=stylesheet href=//fonts.example/css>",
        '<img alt="x" src="http://a.example/b.png">',
        "src: url(https://a.example/f.woff2)",
        '@import "//a.example/b.css"',
    ):
        assert LOADED.search(wrong), wrong
    assert not LOADED.search(
        '<a href="https://arxiv.org/abs/1"><img src="a.png"><link href="../a.css">url(data:x)'
    )


def test_the_index_lists_every_page():
    listed = re.findall(r"^- \[.*?\]\(([\w/-]+\.md)\)", (ROOT / "docs/index.md").read_text(), flags=re.M)
    assert sorted([*listed, "index.md"]) == sorted(
        [*(page.name for page in (ROOT / "docs").glob("*.md")), "tutorials/index.md"]
    )
    tutorials = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/tutorials/index.md").read_text())
    assert sorted([*tutorials, "index.md"]) == sorted(
        page.name for page in (ROOT / "docs/tutorials").glob("*.md")
    )


def test_the_reference_has_every_public_name():
    assert set(re.findall(r"^::: attar\.(\w+)$", site_reference.page(), flags=re.M)) == set(attar.__all__)


def test_roles_become_links():
    html = ":func:<code>run</code> :class:<code>attar.a.PruneSettings</code>, :mod:<code>a.b</code>"
    linked = '<a href="#attar.run">run</a> <a href="settings.html#prune">PruneSettings</a>, b'
    assert re.sub(r"</?code>", "", site_reference.linked(html)) == linked


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_has_its_pages_commands_in_order(page):
    made = json.loads(notebook.of_page(page.read_text()))
    cells = [cell["source"] for cell in made["cells"] if cell["cell_type"] == "code"]
    blocks = re.findall(r"^```(?:sh|python)\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
    shown = [
        cell.removeprefix("%%bash\nset -e\n").replace(" > server.log 2>&1 & echo $! > server.pid", " &")
        for cell in cells
    ]
    assert [cell.replace("$(cat server.pid)", "%1") for cell in shown] == [block.rstrip() for block in blocks]
    texts = "\n".join(cell["source"] for cell in made["cells"] if cell["cell_type"] == "markdown")
    assert "<!--" not in texts and texts.startswith("# ")
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])


def test_a_cell_that_starts_a_server_ends_and_another_stops_it(tmp_path):
    page = "# A\n\n```sh\nattar serve w4 &\n```\n\n```sh\nkill %1\n```\n"
    start, stop = (
        cell["source"].partition("\n")[2]
        for cell in json.loads(notebook.of_page(page))["cells"]
        if cell["cell_type"] == "code"
    )
    (tmp_path / "attar").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "attar").chmod(0o755)
    run = {"cwd": tmp_path, "env": {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, "timeout": 20}
    subprocess.run(["bash", "-c", start], capture_output=True, check=True, **run)  # ends when its output does
    server = int((tmp_path / "server.pid").read_text())
    os.kill(server, 0)
    subprocess.run(["bash", "-c", stop], capture_output=True, check=True, **run)
    until = time.monotonic() + 10
    while time.monotonic() < until and Path(f"/proc/{server}").exists():
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.slow
@pytest.mark.skipif(MKDOCS is None, reason="make docs")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    site = tmp_path / "site"
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert len(files) > 50
    for path in files:
        assert not (found := LOADED.search(path.read_text())), f"{path}: {found and found[0]}"
    reference = (site / "reference.html").read_text()
    for name in attar.__all__:
        assert f'id="attar.{name}"' in reference, name
    for page in site.rglob("*.html"):  # mkdocs does not judge links in docstrings
        for link, anchor in re.findall(r'href="([^":#]+\.html|)#([^"]+)"', page.read_text()):
            target = (page.parent / link).resolve() if link else page
            assert f'id="{anchor}"' in target.read_text(), f"{page.name}: {link}#{anchor}"
    assert (site / "tutorials/speculation.ipynb").is_file()
    assert (site / "search/search_index.json").is_file()
