"""Hooks of mkdocs (mkdocs.yml) that make docs/ into a site, with docs/ itself as plain Markdown for GitHub.

The order of pages is that of docs/index.md. Files of the repository that a page links to become pages under
``repository/``; tutorials get a notebook each, and ``attar.__all__`` a page of reference.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import notebook
import site_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
REMOTE = re.compile(
    r"https://unpkg\.com/[\w./@-]+"
)  # of the theme: for diagrams, and browsers of before 2020


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Navigation in the order of docs/index.md, anchors as GitHub makes them."""
    listed = re.findall(r"^- \[(.*?)\]\(([\w/-]+\.md)\)", (ROOT / "docs/index.md").read_text(), flags=re.M)
    nav: list[Any] = [{"Documentation": "index.md"}, *({title: page} for title, page in listed)]
    for entry in nav:
        folder = PurePosixPath(*entry.values()).parent.name
        if folder:
            pages = re.findall(r"\[(.*?)\]\(([\w-]+\.md)\)", (ROOT / f"docs/{folder}/index.md").read_text())
            entry[next(iter(entry))] = [
                f"{folder}/index.md",
                *({title: f"{folder}/{page}"} for title, page in pages),
            ]
    config.nav = [*nav, {"API reference": "reference.md"}, {"Architecture": "repository/ARCHITECTURE.md"}]
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def anchor(title: str, separator: str) -> str:
    """GitHub's anchor of a heading: letters, digits and dashes, a dash for each space."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", separator)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what is not in docs/: linked files of the repository, the notebooks, the reference."""
    made: dict[str, str] = {"reference.md": site_reference.page()}
    for page in list(files.documentation_pages()):
        text = page.content_string
        if page.src_uri.startswith("tutorials/") and page.name != "index":
            made[page.src_uri.replace(".md", ".ipynb")] = notebook.of_page(text)
        for target in LINK.findall(text):
            path = outside(page.src_uri, target)
            if path and (ROOT / path).is_file():
                made[in_site(path)] = as_page(path)
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def outside(page: str, target: str) -> str | None:
    """The path in the repository that a page's link leads to, ``None`` for one inside docs/."""
    path = normpath(f"docs/{PurePosixPath(page).parent}/{target}")
    return None if path.startswith("docs/") else path


def in_site(path: str) -> str:
    """The page of a repository's file."""
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def as_page(path: str) -> str:
    """A file of the repository as Markdown: as it is, or as code."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n``````{PurePosixPath(path).suffix[1:]}\n{text}\n``````\n"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside docs/ lead to their pages in the site; a tutorial links to its notebook."""
    uri = page.file.src_uri
    folder = str(PurePosixPath(uri).parent)

    def mend(match: re.Match[str]) -> str:
        path = outside(uri, match[1])
        return relpath(in_site(path), folder) if path else match[1]

    if uri.startswith("tutorials/") and page.file.name != "index":
        title, _, text = markdown.partition("\n")
        markdown = f"{title}\n\n[This page as a notebook]({page.file.name}.ipynb)\n{text}"
    return LINK.sub(mend, markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """The reference's links."""
    return site_reference.linked(html) if page.file.src_uri == "reference.md" else html


def on_post_build(*, config: MkDocsConfig) -> None:
    """The theme's scripts name no other host."""
    for script in Path(config.site_dir).glob("assets/javascripts/**/*.js"):
        script.write_text(REMOTE.sub("absent.js", script.read_text()))
