from __future__ import annotations

from dataclasses import replace

import pytest

from attar.checkpoint import Card, open_checkpoint
from attar.checkpoint.licences import identify
from attar.checkpoint.lineage import as_parent, duties_of

APACHE = "\n                Apache License\n           Version 2.0, January 2004\n"


def readme(**fields: object) -> str:
    lines = [f"{name}: {value}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---", "# A model", "license: mit"])


def found(
    make, name: str = "model", files: dict[str, str] | None = None, hub: str | None = None
) -> list[str]:
    checkpoint = open_checkpoint(make(name, files=files))
    return identify(replace(checkpoint, name=hub) if hub else checkpoint)["ids"]


def test_nothing_said_is_unknown(make):
    assert found(make) == ["unknown"]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"license": "apache-2.0"}, ["apache-2.0"]),
        ({"license": "llama3.1"}, ["llama3.1"]),
        ({"license": "other", "license_name": "qwen-research"}, ["qwen-research"]),
        ({"license": "other"}, ["unknown"]),
        ({"license": "bsd-3-clause"}, ["unknown"]),
        ({"license": "[mit, apache-2.0]"}, ["mit", "apache-2.0"]),
        ({"license": "mit", "base_model": "meta-llama/Llama-3.1-8B"}, ["mit", "llama3.1"]),
        ({"license": "mit", "base_model": "[org/x, google/gemma-2-9b]"}, ["mit", "gemma"]),
        ({"base_model": "meta-llama/Llama-2-7b-hf"}, ["unknown", "llama2"]),
        ({"license": "apache-2.0", "base_model": "Qwen/Qwen3-8B"}, ["apache-2.0"]),
    ],
)
def test_front_matter(make, fields, ids):
    assert found(make, files={"README.md": readme(**fields)}) == ids


@pytest.mark.parametrize(
    ("hub", "licence", "ids"),
    [
        ("openai/gpt-oss-20b@main", "apache-2.0", ["gpt-oss"]),
        ("Qwen/Qwen3-8B", "apache-2.0", ["qwen-apache"]),
        ("microsoft/phi-4", "mit", ["phi"]),
        ("deepseek-ai/DeepSeek-R1", "mit", ["deepseek-mit"]),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "mit", ["deepseek-mit", "llama3.1"]),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "mit", ["deepseek-mit", "llama3.3"]),
        ("google/gemma-3-4b-it", "gemma", ["gemma"]),
        ("google/gemma-4-9b", "apache-2.0", ["gemma4"]),
    ],
)
def test_families_by_their_hub_name(make, hub, licence, ids):
    assert found(make, files={"README.md": readme(license=licence)}, hub=hub) == ids


def test_a_name_adds_limits_but_makes_nothing_known(make):
    assert found(make, "a", hub="meta-llama/Llama-3.1-8B") == ["unknown", "llama3.1"]
    assert found(make, "b", hub="Qwen/Qwen3-8B") == ["unknown"]


def test_licence_texts(make):
    assert found(make, "a", files={"LICENSE": APACHE}) == ["apache-2.0"]
    assert found(make, "b", files={"LICENSE.txt": "LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nVersion"}) == [
        "llama3.2"
    ]
    assert found(make, "c", files={"LICENCE.md": "All rights reserved."}) == ["unknown"]
    both = {"LICENSE": "Qwen RESEARCH LICENSE AGREEMENT", "README.md": readme(license="apache-2.0")}
    assert found(make, "d", files=both) == ["apache-2.0", "qwen-research"]


def test_broken_front_matter_is_passed_over(make):
    assert found(make, "a", files={"README.md": "---\nlicense: [mit\n---\n"}) == ["unknown"]
    assert found(make, "b", files={"README.md": "---\n- mit\n---\n"}) == ["unknown"]
    assert found(make, "c", files={"README.md": "license: mit"}) == ["unknown"]


def test_the_card_of_a_root_decides(make):
    folder = make(files={"README.md": readme(license="gemma")})
    Card(name="tiny", stage="train", licence={"ids": ["apache-2.0"]}).write(folder)
    checkpoint = open_checkpoint(folder)
    assert identify(checkpoint)["ids"] == ["apache-2.0"]
    assert as_parent(checkpoint, "signal").licence["ids"] == ["apache-2.0"]
    assert duties_of(checkpoint).status == "allow_with_duties"


def test_evidence_is_kept(make):
    checkpoint = open_checkpoint(make(files={"README.md": readme(license="mit"), "LICENSE": APACHE}))
    assert identify(checkpoint)["evidence"] == [
        "README.md: license mit",
        "LICENSE: text of Apache License 2.0",
    ]
