"""Work that a licence forbids is refused before it begins, unless it is accepted with a reason."""

from __future__ import annotations

from datetime import date

import pytest

from attar.checkpoint.card import Parent
from attar.checkpoint.licence_gate import STALE_DAYS, LicenceSettings, check_licences
from attar.checkpoint.licences import data, duties, entries, identify_service
from attar.errors import LicenceError, SettingsError
from tests.log_lines import LogLines

TODAY = date.fromisoformat(data()["checked_on"])


def root(*licences: str, role: str = "weights", name: str = "org/model") -> Parent:
    return Parent(role=role, name=name, stage="original", licence={"ids": list(licences)})


def lines_of(*lineage: Parent, settings=None, today=TODAY, student=True) -> list[str]:
    progress = LogLines()
    check_licences(lineage, settings or LicenceSettings(), progress, student=student, today=today)
    return progress.lines


BLOCKED = [
    ("llama2", "2023-07-18"),
    ("llama3", "2024-04-18"),
    ("tongyi-qianwen", "2023"),
    ("openai-api", "2025-05-31"),
    ("anthropic-api", "2025-10-08"),
    ("gemini-api", "2026-03-23"),
    ("alibaba-model-studio", ""),
    ("xai-api", ""),
    ("ai21-api", ""),
]


@pytest.mark.parametrize(("teacher", "dated"), BLOCKED)
def test_a_teacher_whose_terms_forbid_it_stops(teacher, dated):
    with pytest.raises(LicenceError) as error:
        lines_of(root("mit"), root(teacher, role="signal", name="org/teacher"))
    message, hint = error.value.message, error.value.hint
    entry = entries()[teacher]
    assert message.startswith(f"org/teacher: {entry['title']}")
    assert entry["clause"] in message
    assert dated in message
    assert "\n" not in message
    assert f"--accept-licence {teacher} --reason TEXT" in hint
    assert entry["source"] in hint
    assert data()["checked_on"] in hint


def test_acceptance_needs_the_right_id_and_passes_with_a_line():
    lineage = [root("mit"), root("openai-api", role="signal")]
    accepted = LicenceSettings(accept_licence=("openai-api",), reason="agreement of 2026-01-02")
    assert "licence openai-api is accepted: agreement of 2026-01-02" in lines_of(*lineage, settings=accepted)
    other = LicenceSettings(accept_licence=("xai-api",), reason="agreement")
    with pytest.raises(LicenceError, match="OpenAI"):
        lines_of(*lineage, settings=other)
    with pytest.raises(LicenceError, match="xAI"):
        lines_of(*lineage, root("xai-api", role="signal"), settings=accepted)


def test_acceptance_goes_on_to_what_is_made_from_it():
    taught = Parent(
        role="weights",
        name="student",
        stage="distill",
        settings={"accept_licence": ["openai-api"], "reason": "a contract"},
        parents=(root("mit"), root("openai-api", role="signal")),
    )
    assert "licence openai-api is accepted: a contract" in lines_of(taught)
    outcome = duties([taught])
    assert outcome.status == "block"  # an acceptance changes no licence
    assert outcome.to_dict()["accepted"] == ({"id": "openai-api", "reason": "a contract"},)
    plain = Parent(role="weights", name="student", stage="distill", parents=taught.parents)
    with pytest.raises(LicenceError):
        lines_of(plain)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"accept_licence": ("llama3",)}, "reason"),
        ({"accept_licence": ("llama3",), "reason": "  "}, "reason"),
        ({"reason": "because"}, "accept_licence"),
        ({"accept_licence": ("lama3",), "reason": "because"}, "accept_licence"),
    ],
)
def test_id_and_reason_are_both_needed(options, field):
    with pytest.raises(SettingsError) as error:
        LicenceSettings(**options)
    assert error.value.field == field


def test_research_only_and_unknown_warn():
    lines = lines_of(
        root("mit"), root("mrl-0.1", role="signal"), root("unknown", role="signal", name="data.jsonl")
    )
    assert any(line.startswith("warning: org/model: Mistral AI Research License") for line in lines)
    assert any(line.startswith("warning: data.jsonl: licence unknown") for line in lines)
    assert any(line.startswith("duty: Outputs fall under section 3") for line in lines)


def test_duties_are_printed_once():
    lines = lines_of(root("llama3.1"), root("llama3.1", role="signal"), root("gemma", role="signal"))
    assert lines.count("duty: Begin the name of the published model with 'Llama'.") == 1
    assert "duty: Show the words 'Built with Llama'." in lines
    assert any("Gemma derivative" in line for line in lines)
    assert not any("warning" in line for line in lines)


def test_old_data_is_pointed_out():
    late = date.fromordinal(TODAY.toordinal() + STALE_DAYS + 1)
    assert lines_of(root("mit", role="signal")) == []
    assert lines_of(root("mit", role="signal"), today=late) == [
        f"warning: attar's data of licences is {STALE_DAYS + 1} days old: look at the terms again"
    ]


def test_before_the_student_is_known_a_family_is_no_reason_to_stop():
    llama = root("llama3", role="signal")
    lines = lines_of(llama, student=False)
    assert any("allows only students made from llama3 weights" in line for line in lines)
    assert any(line.startswith("warning: org/model: Meta Llama 3") for line in lines)
    assert lines_of(root("llama3"), llama) != []
    with pytest.raises(LicenceError):
        lines_of(root("openai-api", role="signal"), student=False)


@pytest.mark.parametrize(
    ("url", "model", "ids"),
    [
        ("https://api.openai.com/v1", "gpt-5-mini", ["openai-api"]),
        ("https://API.OpenAI.com:443/v1", "x", ["openai-api"]),
        ("https://eu.api.openai.com/v1", "x", ["openai-api"]),
        ("https://api.anthropic.com/v1/", "claude-sonnet-5", ["anthropic-api"]),
        ("https://generativelanguage.googleapis.com/v1beta/openai/", "gemini-3-pro", ["gemini-api"]),
        ("https://api.deepseek.com", "deepseek-chat", ["deepseek-api"]),
        ("https://api.mistral.ai/v1", "mistral-large-latest", ["mistral-api"]),
        ("https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1", "openai.gpt-oss-20b", ["bedrock"]),
        ("https://bedrock-mantle.us-east-1.api.aws/v1", "x", ["bedrock"]),
        ("https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "qwen-max", ["alibaba-model-studio"]),
        ("https://api.x.ai/v1", "grok-5", ["xai-api"]),
        ("https://api.ai21.com/studio/v1", "x", ["ai21-api"]),
        ("https://mine.openai.azure.com/openai/v1", "gpt-4o", ["azure-openai", "openai-api"]),
        ("https://europe-west1-aiplatform.googleapis.com/v1", "x", ["vertex-ai"]),
        ("https://openrouter.ai/api/v1", "anthropic/claude-opus-4", ["unknown", "anthropic-api"]),
        ("https://api.openai.com.evil.example/v1", "x", ["unknown"]),
        ("http://127.0.0.1:8000/v1", "meta-llama/Llama-3.1-8B-Instruct", ["unknown", "llama3.1"]),
        ("localhost:8000", "openai/gpt-oss-20b", ["unknown"]),
        ("", "gpt-4o-mini", ["unknown", "openai-api"]),
        ("", "solo-3", ["unknown"]),
    ],
)
def test_terms_of_a_service_by_its_host_and_its_models(url, model, ids):
    assert identify_service(url, model)["ids"] == ids
