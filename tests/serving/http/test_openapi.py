"""Whatever the published document allows, or forbids: no 5xx, and every answer is as the document says."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis", reason="pip install 'attar[dev]'")
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.embeddings.embedders import EngineEmbedder
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests import tiny_models
from tests.serving.http.real import TEMPLATE

pytestmark = pytest.mark.slow
OPERATIONS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "POST /v1/responses",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /v1/score",
    "POST /v1/rerank",
    "GET /ready",
    "GET /version",
    "GET /metrics",
    "GET /attar/state",
)
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The document, and the engine, of a tiny Llama of random weights."""
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("tiny"))
    llm = LLM(str(folder), embeddings=True, kv_tokens=1024, limits=Limits(sequences=16))
    backend = EngineBackend(llm.streams())
    app = create_app(
        backend,
        ServerSettings(name="tiny", allowed_host=("testserver",)),
        tokenizer=ServerTokenizer(tiny_chat()),
        embedder=EngineEmbedder(backend, "mean", llm.engine.pooler.dimensions),
    )
    yield schemathesis.openapi.from_asgi("/openapi.json", app), backend
    assert backend.alive, backend.failure
    llm.engine.check()


def tiny_chat():
    result = tiny_models.tokenizer()
    result.chat_template = TEMPLATE
    return result


CASES = [(name, "positive") for name in OPERATIONS]
CASES += [
    (name, "negative") for name in OPERATIONS if "POST" in name
]  # the others take nothing that is wrong


def operations(document):
    return {
        f"{get_all_operation.ok().method.upper()} {get_all_operation.ok().path}": get_all_operation.ok()
        for get_all_operation in document.get_all_operations()
    }


def test_all_operations_are_known(served):
    actual = {name.replace(":path", "") for name in operations(served[0])}
    assert actual == set(OPERATIONS)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_5xx_and_answers_as_published(served, name, mode):
    document, backend = served
    operation, statuses = operations(document)[name], Counter()

    @settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)), random=st.randoms())
    def holds(case, random):
        if random.random() < 0.8:  # else nearly every request would be answered with 404, or refused
            _to_our_model(case, random)
        statuses[case.call_and_validate(checks=CHECKS.get_by_names(CHECKED)).status_code] += 1
        assert backend.alive, backend.failure

    holds()
    print(name, mode, dict(statuses))
    unknown = "responses/{id}" in name  # ids are random
    assert statuses[200] or mode == "negative" or (unknown and statuses[404]), statuses


def _to_our_model(case, random):
    """The model is the one there is, and some of the fields are left out."""
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = "tiny"
    if isinstance(case.body, dict):
        kept = ("model", "prompt", "messages", "tokens", "query", "documents", "max_tokens")
        case.body = {key: value for key, value in case.body.items() if key in kept or random.random() < 0.2}
        if "model" in case.body:
            case.body["model"] = "tiny"
        if case.path.startswith("/v1/messages") and random.random() < 0.5:  # else blocks rarely fit
            case.body["messages"] = [{"role": "user", "content": "hi"}]
