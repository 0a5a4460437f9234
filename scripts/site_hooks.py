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
LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[)#])")  # relative ones
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
    for page in files.documentation_pages():
        if is_tutorial(page.src_uri):
            made[page.src_uri.replace(".md", ".ipynb")] = notebook.of_page(page.content_string)
    waiting = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    while waiting:
        source = waiting.pop()
        for target in LINK.findall((ROOT / source).read_text()) if source.endswith(".md") else ():
            path = leads_to(source, target)
            if not path.startswith("docs/") and in_site(path) not in made and (ROOT / path).is_file():
                made[in_site(path)] = as_page(path)
                waiting.append(path)
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def is_tutorial(uri: str) -> bool:
    """Whether a page is a tutorial, of which there is a notebook."""
    return uri.startswith("tutorials/") and not uri.endswith("/index.md")


def leads_to(source: str, target: str) -> str:
    """The path in the repository that a link of one of its files leads to."""
    return normpath(f"{PurePosixPath(source).parent}/{target}")


def in_site(path: str) -> str:
    """The page of a repository's file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def as_page(path: str) -> str:
    """A file of the repository as Markdown: as it is, or as code."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n``````{PurePosixPath(path).suffix[1:]}\n{text}\n``````\n"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files lead to their pages in the site; a tutorial links to its notebook."""
    uri = page.file.src_uri
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    if uri == "reference.md" or (source != f"docs/{uri}" and not (ROOT / source).is_file()):
        return markdown  # made here: the reference, or code
    folder = str(PurePosixPath(uri).parent)
    markdown = LINK.sub(lambda link: relpath(in_site(leads_to(source, link[1])), folder), markdown)
    if is_tutorial(uri):
        title, _newline, text = markdown.partition("\n")
        markdown = f"{title}\n\n[This page as a notebook]({page.file.name}.ipynb)\n{text}"
    return markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """The reference's links."""
    return site_reference.linked(html) if page.file.src_uri == "reference.md" else html


def on_post_build(*, config: MkDocsConfig) -> None:
    """The theme's scripts name no other host."""
    for script in Path(config.site_dir).glob("assets/javascripts/**/*.js"):
        script.write_text(REMOTE.sub("absent.js", script.read_text()))
