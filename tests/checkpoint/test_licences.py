from __future__ import annotations

import re
import runpy
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from attar.checkpoint import Card, open_checkpoint
from attar.checkpoint.card import Parent
from attar.checkpoint.licences import STATUSES, _front_matter, age_in_days, data, duties, entries, identify
from attar.checkpoint.lineage import as_parent, duties_of


def root(licence: str, role: str = "weights") -> Parent:
    return Parent(role=role, name=f"org/{licence}", stage="original", licence={"ids": [licence]})


def child(*parents: Parent, role: str = "weights") -> Parent:
    return Parent(role=role, name="made", stage="distill", parents=parents)


def test_every_entry_is_complete():
    words = """
        id title kind released revised clause says source confidence tags names phrases hosts models like
        weights signal display name_prefix
    """
    keys = set(words.split())
    assert data()["version"] == 1
    assert len(data()["licences"]) == len(entries())
    for name, entry in entries().items():
        assert set(entry) <= keys, name
        assert {"title", "clause", "says", "source", "signal"} <= set(entry), name
        assert entry["confidence"] in ("primary", "quoted", "summary"), name
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}|1988", entry.get("released", "2000")), name
        assert ("weights" in entry) != (entry.get("kind") == "provider"), name
        for role in ("weights", "signal"):
            effect = entry.get(role, {"status": "allow"})
            assert effect["status"] in STATUSES, name
            students = effect.get("students", {"family": []})
            assert set(students["family"]) | set(students.get("review", [])) <= set(entries()), name
        for pattern in (*entry.get("names", []), *entry.get("hosts", []), *entry.get("models", [])):
            re.compile(pattern)
        assert ("hosts" in entry) == (entry.get("kind") == "provider"), name


def test_every_row_of_the_survey_is_there():
    survey = """
        llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma gemma4 qwen-apache qwen qwen-research
        tongyi-qianwen mistral-apache mrl-0.1 mnpl-0.1 deepseek-mit deepseek-1.0 phi gpt-oss nvidia-open-model
        cc-by-nc tencent-hunyuan openai-api anthropic-api gemini-api deepseek-api mistral-api bedrock
        alibaba-model-studio xai-api ai21-api
    """
    assert set(entries()) == {*survey.split(), "apache-2.0", "mit", "azure-openai", "vertex-ai"}


def test_the_age_of_the_data_is_known():
    assert age_in_days(date(2027, 9, 20)) == 365


def test_permissive_weights():
    outcome = duties([root("apache-2.0")])
    assert outcome.status == "allow_with_duties"
    assert "Apache-2.0" in outcome.duties[0]
    assert outcome.name_prefix is None
    assert duties([root("mit", "signal"), root("apache-2.0", "signal")]).status == "allow"


def test_unknown_stays_unknown():
    for lineage in (
        [root("unknown")],
        [root("no-such-licence")],
        [Parent(role="weights", name="x", stage="original")],
    ):
        outcome = duties(lineage)
        assert outcome.status == "unknown"
        assert "find out" in outcome.duties[0]
    assert duties([]).status == "unknown"
    assert duties([root("apache-2.0"), root("unknown", "signal")]).status == "unknown"


def test_union_of_duties_and_meet_of_permissions():
    outcome = duties([root("apache-2.0"), root("mrl-0.1")])
    assert outcome.status == "research_only"
    assert len(outcome.duties) == 3
    assert [source.id for source in outcome.sources] == ["apache-2.0", "mrl-0.1"]
    assert duties([root("cc-by-nc"), root("unknown")]).status == "unknown"


@pytest.mark.parametrize("version", ["llama3.1", "llama3.2", "llama3.3", "llama4"])
def test_llama_gives_its_name_to_students_too(version):
    by_weights, by_signal = duties([root(version)]), duties([root("apache-2.0"), root(version, "signal")])
    assert by_weights.name_prefix == by_signal.name_prefix == "Llama"
    assert by_weights.display == ("Built with Llama",)
    assert by_signal.display == ()  # asked for only where the materials themselves are inside
    assert by_signal.status == "allow_with_duties"
    assert any("'Llama'" in duty for duty in by_signal.duties)


@pytest.mark.parametrize("teacher", ["llama2", "llama3", "tongyi-qianwen"])
def test_teachers_that_allow_only_their_own_family(teacher):
    blocked = duties([root("apache-2.0"), root(teacher, "signal")])
    assert blocked.status == "block"
    assert any("allows only students" in duty for duty in blocked.duties)
    assert duties([root(teacher), root(teacher, "signal")]).status == "allow_with_duties"


def test_llama_3_teaching_llama_3_1_needs_a_person():
    outcome = duties([root("llama3.1"), root("llama3", "signal")])
    assert outcome.status == "unknown"
    assert any("have it reviewed" in duty for duty in outcome.duties)
    assert outcome.name_prefix == "Llama 3"


@pytest.mark.parametrize("teacher", ["gemma", "deepseek-1.0", "tencent-hunyuan"])
def test_students_that_become_derivatives(teacher):
    outcome = duties([root("mit"), root(teacher, "signal")])
    assert outcome.status == "allow_with_duties"
    assert any("derivative" in duty for duty in outcome.duties)


def test_qwen_wants_to_be_named():
    assert "Built with Qwen" in duties([root("mit"), root("qwen", "signal")]).display[0]
    assert duties([root("mit"), root("qwen-research", "signal")]).status == "research_only"


@pytest.mark.parametrize(
    ("provider", "status"),
    [
        ("openai-api", "block"),
        ("anthropic-api", "block"),
        ("gemini-api", "block"),
        ("deepseek-api", "allow_with_duties"),
        ("mistral-api", "unknown"),
        ("bedrock", "unknown"),
        ("alibaba-model-studio", "block"),
        ("xai-api", "block"),
        ("ai21-api", "block"),
    ],
)
def test_answers_of_a_service(provider, status):
    assert duties([root("mit"), root(provider, "signal")]).status == status


def test_one_signal_on_the_way_makes_the_root_a_signal():
    taught = child(root("mit"), child(root("llama2"), role="signal"))
    outcome = duties([taught])
    assert [(source.id, source.role) for source in outcome.sources] == [
        ("mit", "weights"),
        ("llama2", "signal"),
    ]
    assert outcome.status == "block"
    onward = duties([root("apache-2.0"), child(root("gemma"), role="signal")])
    assert any("Gemma derivative" in duty for duty in onward.duties)


def test_each_duty_is_listed_once():
    outcome = duties([child(root("llama3.1")), root("llama3.1"), root("llama3.1", "signal")])
    assert len(outcome.duties) == len(set(outcome.duties)) == 4
    assert [source.role for source in outcome.sources] == ["weights", "signal"]
    content = outcome.to_dict()
    assert content["sources"][0]["clause"] == "1.b.i, 2"
    assert content["sources"][0]["checked_on"] == "2026-09-20"


APACHE = "\n                Apache License\n           Version 2.0, January 2004\n"


def readme(**fields: object) -> str:
    lines = [f"{name}: {value}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---", "# A model", "license: mit"])


def licence_ids(
    make, name: str = "model", files: dict[str, str] | None = None, hub: str | None = None
) -> list[str]:
    checkpoint = open_checkpoint(make(name, files=files))
    return identify(replace(checkpoint, name=hub) if hub else checkpoint)["ids"]


def test_a_model_without_a_licence_is_unknown(make):
    assert licence_ids(make) == ["unknown"]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"license": "apache-2.0"}, ["apache-2.0"]),
        ({"license": "llama3.1"}, ["llama3.1"]),
        ({"license": "other", "license_name": "qwen-research"}, ["qwen-research"]),
        ({"license": "other", "license_name": "apache-2.0-llama2"}, ["apache-2.0", "llama2"]),
        ({"license": "other", "license_name": "qwen-research-mit-gemma"}, ["qwen-research", "mit", "gemma"]),
        ({"license": "other", "license_name": "mit-whatever"}, ["unknown"]),
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
    assert licence_ids(make, files={"README.md": readme(**fields)}) == ids


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
    assert licence_ids(make, files={"README.md": readme(license=licence)}, hub=hub) == ids


def test_a_name_adds_limits_but_makes_nothing_known(make):
    assert licence_ids(make, "a", hub="meta-llama/Llama-3.1-8B") == ["unknown", "llama3.1"]
    assert licence_ids(make, "b", hub="Qwen/Qwen3-8B") == ["unknown"]


def test_licence_texts(make):
    assert licence_ids(make, "a", files={"LICENSE": APACHE}) == ["apache-2.0"]
    assert licence_ids(
        make, "b", files={"LICENSE.txt": "LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nVersion"}
    ) == ["llama3.2"]
    assert licence_ids(make, "c", files={"LICENCE.md": "All rights reserved."}) == ["unknown"]
    both = {"LICENSE": "Qwen RESEARCH LICENSE AGREEMENT", "README.md": readme(license="apache-2.0")}
    assert licence_ids(make, "d", files=both) == ["apache-2.0", "qwen-research"]


def test_broken_front_matter_is_passed_over(make):
    assert licence_ids(make, "a", files={"README.md": "---\nlicense: [mit\n---\n"}) == ["unknown"]
    assert licence_ids(make, "b", files={"README.md": "---\n- mit\n---\n"}) == ["unknown"]
    assert licence_ids(make, "c", files={"README.md": "license: mit"}) == ["unknown"]


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


def test_the_page_has_the_table_of_the_data():
    script = Path(__file__).parents[2] / "scripts" / "document_licences.py"
    names = runpy.run_path(str(script))
    assert names["PAGE"].read_text(encoding="utf-8") == names["page"]()


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10 if n else ['x'] * 10)}]\n" for n in range(9))
FRONTS = ["license: 2024-99-99", "license: [" + "[" * 400, BOMB + "license: *a8", "license: " + "9" * 5000]


@pytest.mark.parametrize("front", FRONTS)
def test_a_readme_that_is_no_front_matter_names_no_licence(tmp_path, front):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\nlicense: apache-2.0\n")
    assert _front_matter(tmp_path / "README.md") == {}
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n" + "x" * 3_000_000)
    assert _front_matter(tmp_path / "README.md") == {"license": "apache-2.0"}
