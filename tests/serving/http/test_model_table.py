"""Several models by name: loads on request, the budget of memory, and who is let go."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
import httpx
from prometheus_client.parser import text_string_to_metric_families

from attar.errors import AttarError, ModelError, SettingsError
from attar.progress import SILENT
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.load_models import models_in, named_models
from attar.serving.http.model_table import RETRY_S, MemoryBudget, NamedModel, ServedModel
from attar.serving.http.settings import (
    EmbeddingSettings,
    ModelsSettings,
    ServeCommand,
    ServerSettings,
    TemplateSettings,
)
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.http.transport import ConnectionSettings
from attar.serving.services.settings import ServiceSettings
from tests import tiny_models
from tests.serving.http.fake import SLOW, FakeBackend, FakeTokenizer
from tests.serving.http.real import leaving, refused
from tests.serving.http.test_live import running_app, until

HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
SIZE = 100  # bytes that each model here takes


class Models:
    """Named models without engines, which say their own names.

    Attributes:
        loads: names in the order of their loads.
        gate: a load waits for it.
    """

    def __init__(self, *names):
        self.loads, self.backends, self.errors = [], {}, {}
        self.gate = threading.Event()
        self.gate.set()
        self.named = [NamedModel(name, SIZE, lambda name=name: self.load(name)) for name in names]

    def load(self, name):
        self.loads.append(name)
        assert threading.current_thread().name == "attar-loader"
        self.gate.wait(60)
        if name in self.errors:
            raise self.errors[name]
        backend = self.backends[name] = FakeBackend(answer=f"I am {name}")
        return ServedModel(name, backend, FakeTokenizer(), {"model": name})


@contextmanager
def serving(models, total=None, kept=SIZE, **settings):
    """A first model that is always loaded, and named ones: the address and the server."""
    settings = ServerSettings(port=0, **settings)
    budget = MemoryBudget(total, kept)
    backend, words = FakeBackend(answer="I am first"), FakeTokenizer()
    app = create_app(backend, settings, tokenizer=words, model="first", named=models.named, budget=budget)
    with running_app(app, settings) as (url, server):
        yield url, server
    assert not any(slot.users for slot in app.state.models._slots.values())
    assert not app.state.service.admission.active


def ask(url, model, prompt="hi", timeout=30, headers=None, **more):
    body = {"model": model, "prompt": prompt, **more}
    return HTTP.post(f"{url}/v1/completions", json=body, timeout=timeout, headers=headers)


def said(response):
    return response.raise_for_status().json()["choices"][0]["text"]


def in_thread(call, *arguments, **options):
    """Start a call; its result is got by ``result()``."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*arguments, **options)), daemon=True)
    thread.start()

    def result():
        thread.join(60)
        assert results, "there is no answer"
        return results[0]

    return result


def loaded(url):
    cards = HTTP.get(f"{url}/v1/models").json()["data"]
    return {card["id"]: card["loaded"] for card in cards}


def release(backend):
    """Let the slow requests of a backend end."""
    backend.loop.call_soon_threadsafe(backend.release.set)


def test_each_model_is_loaded_by_its_first_request_and_answers_by_its_name():
    models = Models("b", "c")
    with serving(models) as (url, _):
        assert loaded(url) == {"first": True, "b": False, "c": False} and models.loads == []
        card = HTTP.get(f"{url}/v1/models/b").json()
        assert card["id"] == "b" and not card["loaded"] and models.loads == [], "a look loads nothing"
        for name in ("b", "first", "c", "b"):
            assert said(ask(url, name)) == f"I am {name}"
        assert models.loads == ["b", "c"] and loaded(url) == {"first": True, "b": True, "c": True}
        chat = {"model": "c", "messages": [{"role": "user", "content": "hi"}]}
        answer = HTTP.post(f"{url}/v1/chat/completions", json=chat).json()
        assert answer["model"] == "c" and answer["choices"][0]["message"]["content"] == "I am c"
        stream = "".join(
            HTTP.post(f"{url}/v1/completions", json={"model": "b", "prompt": "x", "stream": True}).text
        )
        assert '"model":"b"' in stream and stream.endswith("data: [DONE]\n\n")
        assert HTTP.post(f"{url}/tokenize", json={"model": "b", "prompt": "hi"}).json()["count"] == 3
        detail = refused(ask(url, "d"), 404, "model_not_found", "model")
        assert detail["message"] == "The model 'd' does not exist; this server has 'first', 'b', 'c'."
        refused(HTTP.get(f"{url}/v1/models/d"), 404)
    assert all(backend.closed for backend in models.backends.values())


def test_nobody_closes_what_another_caller_keeps():
    models = Models("b")
    keys = [{"Authorization": f"Bearer {key * 16}"} for key in "xy"]
    with serving(models, api_key=("x" * 16, "y" * 16)) as (url, server):
        table = server.config.app.state.models

        def keep(caller, seconds):
            body = {"model": "b", "messages": [], "keep_alive": seconds}
            return HTTP.post(f"{url}/api/chat", json=body, headers=keys[caller]).raise_for_status().json()

        assert keep(0, "1h")["done_reason"] == "load"
        assert keep(1, 0)["done_reason"] == "unload" and table.loaded_service("b") is not None
        assert 3500 < table.kept_s("b") <= 3600
        said(ask(url, "b", headers=keys[1]))
        assert keep(0, 0) and table.kept_s("b") == float("inf"), "the other caller said no time"
        assert keep(1, 0.05)["done_reason"] == "load"
        until(lambda: table.loaded_service("b") is None)
        assert models.backends["b"].closed and models.loads == ["b"]
        for number in range(1000):
            table._slots["b"].keep(str(number), 10**9 + number)
        assert len(table._slots["b"].kept_until) <= 257 and table._slots["b"].expires == 10**9 + 999
        assert said(ask(url, "b", headers=keys[0])) == "I am b" and models.loads == ["b", "b"]


def test_metrics_have_every_loaded_model_and_each_family_once():
    models = Models("b", "c")
    with serving(models) as (url, _):
        ask(url, "b")
        text = HTTP.get(f"{url}/metrics").text
        types = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types))
        families = {family.name: family for family in text_string_to_metric_families(text)}
        running = families["attar:num_requests_running"].samples
        assert [sample.labels["model_name"] for sample in running] == ["first", "b"]
        tokens = {s.labels["model_name"]: s.value for s in families["attar:generation_tokens"].samples}
        assert tokens["first"] == 0 and tokens["b"] == len("I am b")
        info = [sample.labels["model_name"] for sample in families["attar:info"].samples]
        assert info == ["first", "b"]
        states = {s.labels["model_name"]: s.value for s in families["attar:model_loaded"].samples}
        assert states == {"b": 1, "c": 0}


def test_one_load_for_all_who_wait_while_others_are_served():
    models = Models("b")
    models.gate.clear()
    with serving(models) as (url, _):
        answers = [in_thread(ask, url, "b") for _ in range(4)]
        until(lambda: models.loads)
        for _ in range(3):
            assert said(ask(url, "first")) == "I am first"
            assert HTTP.get(f"{url}/health").status_code == 200
        assert loaded(url) == {"first": True, "b": False}
        models.gate.set()
        assert [said(answer()) for answer in answers] == ["I am b"] * 4
        assert models.loads == ["b"]


def test_a_client_that_leaves_while_a_model_loads_is_let_go():
    models = Models("b")
    models.gate.clear()
    with serving(models) as (url, server):
        table = server.config.app.state.models
        with leaving(url, {"model": "b", "prompt": "hi"}):
            until(lambda: models.loads and table._slots["b"].users)
        until(lambda: not table._slots["b"].users)
        assert not table.first.admission.active and models.loads == ["b"]
        models.gate.set()
        until(lambda: loaded(url)["b"])
        assert said(ask(url, "b")) == "I am b" and models.loads == ["b"], "the load was not in vain"


def test_a_load_that_fails_answers_all_who_wait_and_is_tried_again():
    models = Models("b")
    models.errors["b"] = ModelError("/secret/path: damaged")
    models.gate.clear()
    with serving(models) as (url, server):
        table = server.config.app.state.models
        answers = [in_thread(ask, url, "b") for _ in range(3)]
        until(lambda: table._slots["b"].users == 3)
        models.gate.set()
        for answer in answers:
            response = answer()
            detail = refused(response, 503, "model_not_loaded")
            assert detail["message"] == "the model 'b' cannot be loaded; the server's log has the reason"
            assert response.headers["retry-after"] == str(RETRY_S)
        refused(ask(url, "b"), 503, "model_not_loaded")
        assert models.loads == ["b"], "not at once"
        del models.errors["b"]
        table._slots["b"].retry_at = time.monotonic()
        assert said(ask(url, "b")) == "I am b" and models.loads == ["b", "b"]
        assert said(ask(url, "first")) == "I am first"


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [OSError("no"), MemoryError(), ZeroDivisionError("a bug")])
def test_any_error_of_a_load_is_an_answer(error):
    models = Models("b")
    models.errors["b"] = error
    with serving(models) as (url, _):
        refused(ask(url, "b"), 503, "model_not_loaded")
        assert HTTP.get(f"{url}/health").status_code == 200


def test_the_least_recently_used_idle_model_makes_room():
    models = Models("b", "c", "d")
    with serving(models, total=3 * SIZE) as (url, _):
        for name in ("b", "c", "b", "d"):  # c was used before b
            assert said(ask(url, name)) == f"I am {name}"
        assert loaded(url) == {"first": True, "b": True, "c": False, "d": True}
        assert models.backends["c"].closed and not models.backends["b"].closed
        assert said(ask(url, "c")) == "I am c"
        assert loaded(url) == {"first": True, "b": False, "c": True, "d": True}
        assert models.loads == ["b", "c", "d", "c"]


def test_a_model_in_use_is_never_closed():
    models = Models("b", "c")
    with serving(models, total=2 * SIZE) as (url, server):
        table = server.config.app.state.models
        said(ask(url, "b"))
        slow = in_thread(ask, url, "b", prompt=[SLOW])
        until(lambda: models.backends["b"].open)
        response = ask(url, "c")
        detail = refused(response, 503, "no_memory")
        assert detail["message"] == (
            "no room for the model 'c' (100 B) within --model-memory 200 B: the other models are in use"
        )
        assert int(response.headers["retry-after"]) >= 1 and models.loads == ["b"]
        stream = in_thread(ask, url, "b", prompt=[SLOW], stream=True)
        until(lambda: len(models.backends["b"].open) == 2)
        release(models.backends["b"])
        assert said(slow()) == "I am b" and "DONE" in stream().text
        until(lambda: not table._slots["b"].users)
        assert said(ask(url, "c")) == "I am c" and models.backends["b"].closed


def test_a_vanishing_client_of_a_stream_frees_its_model():
    models = Models("b", "c")
    with serving(models, total=2 * SIZE) as (url, server):
        with leaving(url, {"model": "b", "prompt": [SLOW], "stream": True}):
            until(lambda: "b" in models.backends and models.backends["b"].open)
        until(lambda: not server.config.app.state.models._slots["b"].users)
        assert said(ask(url, "c")) == "I am c"


def test_shutting_down_ends_those_who_wait_for_a_model():
    models = Models("b")
    models.gate.clear()
    with serving(models) as (url, server):
        table = server.config.app.state.models
        answer = in_thread(ask, url, "b")
        until(lambda: models.loads)
        table.first.admission.draining = True
        assert HTTP.get(f"{url}/ready").status_code == 503
        refused(ask(url, "b"), 503, "shutting_down")
        server.servers[0].get_loop().call_soon_threadsafe(table.first.admission.shut_down)
        refused(answer(), 503, "shutting_down")
        models.gate.set()


def test_an_engine_that_stops_stops_the_server_whichever_it_is():
    models = Models("b")
    with serving(models) as (url, server):
        assert said(ask(url, "b")) == "I am b"
        backend = models.backends["b"]
        backend.alive, backend.failure = False, AssertionError("3 blocks leaked")
        answer = HTTP.get(f"{url}/health")
        assert answer.status_code == 503 and answer.json()["reason"] == "3 blocks leaked"
        assert HTTP.get(f"{url}/ready").status_code == 503
        until(lambda: server._stopped_since is not None)
        backend.alive, backend.failure = True, None


def test_the_limits_of_a_key_count_all_models(tmp_path):
    models = Models("b")
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- {name: web, key: key-of-the-web, max_texts: 2}\n")
    headers = {"Authorization": "Bearer key-of-the-web"}
    with serving(models, keys=str(keys)) as (url, server):
        refused(ask(url, "b"), 401)
        assert models.loads == [], "nothing is loaded without a key"
        slow = in_thread(ask, url, "b", prompt=[SLOW], n=2, headers=headers)
        until(lambda: models.backends.get("b") and models.backends["b"].open)
        refused(ask(url, "first", headers=headers), 429, "too_many_requests")
        release(models.backends["b"])
        assert slow().status_code == 200
        until(lambda: not server.config.app.state.models.first.admission.active)
        assert said(ask(url, "first", headers=headers)) == "I am first"


def test_requests_that_wait_for_models_are_bounded():
    models = Models("b")
    models.gate.clear()
    with serving(models, max_queue=2) as (url, server):
        table = server.config.app.state.models
        answers = [in_thread(ask, url, "b") for _ in range(2)]
        until(lambda: table._slots["b"].users == 2)
        refused(ask(url, "b"), 429, "queue_full")
        models.gate.set()
        assert [said(answer()) for answer in answers] == ["I am b"] * 2


# with engines


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four models of random weights."""
    place = tmp_path_factory.mktemp("several")
    return {
        name: str(tiny_models.save(tiny_models.build("llama3", seed=seed), place / name))
        for seed, name in enumerate(("first", "b", "c", "d"))
    }


LIMITS = {"kv_tokens": 1024, "limits": Limits(sequences=8, step_tokens=32)}


@pytest.mark.slow
def test_twenty_clients_of_three_models_with_room_for_two(folders):
    """Every answer is that of the model alone; what was closed is freed; no block leaks."""
    prompts = [[5 + i, 9, 7 + i, 30] for i in range(4)]
    params, before = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), threading.active_count()
    want, engines, loads = {}, [], []
    for name in ("b", "c", "d"):
        results = LLM(folders[name], **LIMITS).generate(prompts, params)
        want[name] = [list(result.samples[0].token_ids) for result in results]

    def load(name):
        llm = LLM(folders[name], **LIMITS)
        checked = llm.engine
        engines.append((weakref.ref(checked), weakref.ref(checked.runner)))
        loads.append(name)
        close = (backend := EngineBackend(llm.streams())).close

        async def close_and_check():
            await close()
            checked.check()

        backend.close = close_and_check
        return ServedModel(name, backend, ServerTokenizer(llm.tokenizer))

    first = LLM(folders["first"], **LIMITS)
    named = [NamedModel(name, SIZE, lambda name=name: load(name)) for name in want]
    settings, words = ServerSettings(port=0), ServerTokenizer(first.tokenizer)
    app = create_app(
        EngineBackend(first.streams()),
        settings,
        tokenizer=words,
        model="first",
        named=named,
        budget=MemoryBudget(3 * SIZE, SIZE),
    )

    async def client(number, http):
        """Three requests, one of another model each time; with 503 it comes again."""
        answers = []
        for turn in range(3):
            name, index = "bcd"[(number + turn) % 3], (number * turn) % 4
            body = {"model": name, "prompt": prompts[index], "max_tokens": 5, "temperature": 0}
            body |= {"ignore_eos": True, "attar": {"tokens": True}}
            for _ in range(2000):
                response = await http.post("/v1/completions", json=body)
                if response.status_code != 503:
                    break
                assert response.json()["error"]["code"] == "no_memory" and "retry-after" in response.headers
                await asyncio.sleep(0.01)
            answers.append((response.json()["choices"][0]["attar"]["token_ids"], want[name][index]))
            if number % 5 == 0:  # this client leaves in the middle of a stream, too
                async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
                    await anext(stream.aiter_bytes(), None)
        return answers

    async def crowd(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            return await asyncio.gather(*(client(number, http) for number in range(20)))

    with running_app(app, settings) as (url, server):
        answers = asyncio.run(crowd(url))
        for got, expected in (pair for own in answers for pair in own):
            assert got == expected
        assert len(loads) > 3, "models were closed and loaded again"
        table = server.config.app.state.models
        until(lambda: not any(slot.users for slot in table._slots.values()))
        assert len(table.loaded) == 3 and first.engine.idle
        gc.collect()
        alive = [runner() for _, runner in engines if runner() is not None]
        assert len(alive) == 2, "a closed model is freed"
        assert threading.active_count() < before + 40
        del alive
    first.engine.check()


def command(model, models, **options):
    return ServeCommand(
        model=model,
        settings=ServerSettings(**options.pop("settings", {})),
        answers=TemplateSettings(),
        services=options.pop("services", ServiceSettings()),
        transport=ConnectionSettings(),
        embeddings=EmbeddingSettings(),
        template="",
        defaults={},
        options={"kv_tokens": 256, **options},
        progress=SILENT,
        show=lambda line: None,
        models=models,
    )


def test_models_of_the_command_line(folders):
    named = tuple(f"{name}={folders[name]}" for name in ("b", "c"))
    models, budget = named_models(command(folders["first"], ModelsSettings(named_model=named)))
    assert [model.name for model in models] == ["b", "c"] and budget.total is None
    served = models[0].load()
    assert served.name == "b" and served.defaults is not None and served.facts["kv_tokens"] == 256
    asyncio.run(served.backend.close())
    one = models[0].bytes
    _, budget = named_models(
        command(folders["first"], ModelsSettings(named_model=named, model_memory=f"{2 * one}"))
    )
    assert budget.excess(one) == 0 < budget.excess(one + 1)


@pytest.mark.parametrize(
    "named, memory, settings, words",
    [
        (("b",), "", {}, "named_model is 'b'"),
        (("=x",), "", {}, "NAME=PATH"),
        (("b={b}", "b={c}"), "", {}, "each name once"),
        (("b={b}",), "much", {}, "model_memory is 'much'"),
        (("b={b}",), "1kB", {}, "model_memory is '1kB'"),
        (("first={b}",), "", {"name": "first"}, "a name that no other model has"),
        (("b=/no/such/folder",), "", {}, "/no/such/folder"),
        (("b={b}",), "{one}", {}, "b takes"),
    ],
)
def test_wrong_command_lines_are_refused_at_start(folders, named, memory, settings, words):
    plain, _ = named_models(command(folders["first"], ModelsSettings(named_model=(f"x={folders['b']}",))))
    named = tuple(text.format(**folders) for text in named)
    with pytest.raises(AttarError, match=words):
        settings = {"settings": settings}
        models = ModelsSettings(named_model=named, model_memory=memory.format(one=plain[0].bytes))
        named_models(command(folders["first"], models, **settings))


def test_a_folder_of_models(folders, tmp_path):
    for name, target in (("b", "b"), ("First", "first"), ("given", "c")):
        (tmp_path / name).symlink_to(folders[target])
    for name in ("broken", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{")
    (tmp_path / "no model").mkdir()
    for name in (
        "x-00001-of-00002.gguf",
        "x-00002-of-00002.gguf",
        "y.GGUF",
        "b.gguf",
        ".z.gguf",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(b"")
    actual = {name: Path(path).name for name, path in models_in(str(tmp_path)).items()}
    assert actual == {
        **{name: name for name in ("First", "b", "broken", "given")},
        "x": "x-00001-of-00002.gguf",
        "y": "y.GGUF",
    }
    lines = []
    settings = ModelsSettings(model_folder=str(tmp_path), named_model=(f"given={folders['b']}",))
    models, _ = named_models(replace(command(folders["first"], settings), show=lines.append))
    assert [model.name for model in models] == ["given", "b"], "the first model is not loaded twice"
    assert models[0].source == str(folders["b"]) and models[1].source == str(tmp_path / "b")
    assert [line.split(":")[0].split()[-1] for line in lines if line.startswith("left out")] == [
        "broken",
        "x",
        "y",
    ]
    for folder in (tmp_path / "no model", tmp_path / "missing", tmp_path / "notes.txt"):
        with pytest.raises(SettingsError, match="model_folder"):
            models_in(str(folder))


def test_roles_have_no_models_of_their_own(folders):
    models = ModelsSettings(named_model=(f"b={folders['b']}",))
    services = ServiceSettings(role="draft", draft_endpoint=())
    with pytest.raises(SettingsError, match="without --role"):
        named_models(command(folders["first"], models, services=services))
