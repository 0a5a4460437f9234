"""Adapters by name in requests, loaded and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("peft")
import httpx

from attar.errors import CheckpointError, SettingsError
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http import serve
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.embeddings.embedders import EngineEmbedder
from attar.serving.http.lora_adapters import AdapterBackend, first_adapters
from attar.serving.http.settings import LoraSettings, ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.runtime.runner.test_lora import broken, generate, write_adapter
from tests.serving.http.real import leaving, refused
from tests.serving.http.test_live import running_app, until

HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
PROMPT = [5, 9, 30, 7, 77, 12, 3, 44, 9, 9, 2, 18, 100, 101, 102, 103, 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, two adapters below a folder, and one elsewhere."""
    place = tmp_path_factory.mktemp("served")
    tiny_models.save(tiny_models.build("llama3"), place / "model")
    write_adapter(place / "all" / "a", tiny_models.build("llama3"), 1, target_modules="all-linear")
    write_adapter(place / "all" / "b", tiny_models.build("llama3"), 2, target_modules=["q_proj", "up_proj"])
    shutil.copytree(place / "all" / "b", place / "secret")
    (place / "all" / "link").symlink_to(place / "secret")
    return place


@contextmanager
def serving(folders, lora=("a",), folder=True, max_loras=3, embeddings=False, options=None, **settings):
    """A server of the model: address, engine, server."""
    options = {"runner": "modules"} if options is None else options
    limits = Limits(sequences=8, step_tokens=24)
    model = str(folders / "model")
    llm = LLM(model, limits=limits, kv_tokens=1024, embeddings=embeddings, adapters=True, **options)
    named = tuple(f"{name}={folders / 'all' / name}" for name in lora)
    where = str(folders / "all") if folder else ""
    loras = LoraSettings(lora=named, lora_folder=where, max_loras=max_loras)
    adapters = first_adapters(loras, llm.engine.runner)
    settings, backend = ServerSettings(port=0, **settings), EngineBackend(llm.streams())
    embedder = EngineEmbedder(backend, "mean", 64) if embeddings else None
    words = ServerTokenizer(llm.tokenizer)
    parts = {"tokenizer": words, "model": "base", "lora": loras, "adapters": adapters, "embedder": embedder}
    with running_app(create_app(backend, settings, **parts), settings) as (url, server):
        yield url, llm.engine, server
    assert not any(entry.users for entry in server.config.app.state.models.lora._entries.values())
    llm.engine.check()


def body(model, prompt=PROMPT, **more):
    return {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | {
        "attar": {"tokens": True},
        **more,
    }


def ids(response):
    return response.raise_for_status().json()["choices"][0]["attar"]["token_ids"]


def ask(url, model, **more):
    return ids(HTTP.post(f"{url}/v1/completions", json=body(model, **more)))


def load(url, name, path, **options):
    return HTTP.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, **options)


def unload(url, name, **options):
    return HTTP.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, **options)


@pytest.fixture(scope="module")
def want(folders):
    """The answers to PROMPT: of the model alone, and with each adapter alone."""
    answers = {}
    for name in ("base", "a", "b"):
        llm = LLM(str(folders / "model"), runner="modules", kv_tokens=1024)
        if name != "base":
            first_adapters(LoraSettings(lora=(f"{name}={folders / 'all' / name}",)), llm.engine.runner)
        key = "" if name == "base" else f"{name} 0"
        answers[name] = generate(llm, [(PROMPT, key)])[0]
    assert len(set(map(tuple, answers.values()))) == 3
    return answers


def test_an_adapter_answers_by_its_name_and_comes_and_goes(folders, want):
    with serving(folders) as (url, engine, _):
        assert ask(url, "base") == want["base"] and ask(url, "a") == want["a"]
        answer = HTTP.post(f"{url}/v1/completions", json=body("a")).json()
        assert answer["model"] == "a" and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        refused(HTTP.post(f"{url}/v1/completions", json=body("b")), 404, "model_not_found")
        response = load(url, "b", "b")
        assert response.text == "Success: LoRA adapter 'b' added successfully."
        cards = HTTP.get(f"{url}/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("base", None),
            ("a", "base"),
            ("b", "base"),
        ]
        assert HTTP.get(f"{url}/v1/models/b").json()["max_model_len"] == 128
        rows = [HTTP.get(f"{url}/api/{path}").json()["models"] for path in ("tags", "ps")]
        names = [("base:latest", ""), ("a:latest", "base:latest"), ("b:latest", "base:latest")]
        assert [[(row["name"], row["details"]["parent_model"]) for row in listed] for listed in rows] == [
            names
        ] * 2
        hits = engine.scheduler.manager.stats.hit
        assert ask(url, "b") == want["b"]
        assert engine.scheduler.manager.stats.hit == hits, "no prefix of another adapter"
        stream = HTTP.post(f"{url}/v1/completions", json=body("b", stream=True)).text
        assert '"model":"b"' in stream
        assert unload(url, "a").text == "Success: LoRA adapter 'a' removed successfully."
        refused(HTTP.post(f"{url}/v1/completions", json=body("a")), 404, "model_not_found")
        refused(unload(url, "a"), 404, "adapter_not_found")
        until(lambda: len(engine.runner.adapters) == 1)
        assert load(url, "a", str(folders / "all" / "b")).status_code == 200, "the name is free again"
        hits = engine.scheduler.manager.stats.hit
        assert ask(url, "a") == want["b"]
        assert engine.scheduler.manager.stats.hit == hits + 16, "the same content shares prefixes"
        assert ask(url, "base") == want["base"]


@pytest.mark.slow
def test_adapters_come_and_go_under_traffic(folders, want):
    """Each answer is that of the adapter which the request named; nothing leaks."""
    answers, wrong = {"base": 0, "a": 0, "b": 0}, []

    async def client(http, name, ends):
        while not ends.is_set():
            response = await http.post("/v1/completions", json=body(name))
            if response.status_code == 200:
                answers[name] += 1
                wrong.extend([name] if ids(response) != want[name] else [])
            elif response.status_code != 404 or name != "b":
                wrong.append(response.text)

    async def swap(http, ends):
        for _ in range(6):
            (
                await http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "b"})
            ).raise_for_status()
            before = answers["b"]
            while answers["b"] == before and not wrong:
                await asyncio.sleep(0.01)
            (await http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})).raise_for_status()
        ends.set()

    async def traffic(url):
        ends = asyncio.Event()
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
            await asyncio.gather(swap(http, ends), *(client(http, name, ends) for name in ("base", "a", "b")))

    with serving(folders, max_loras=8) as (url, engine, server):
        asyncio.run(traffic(url))
        assert not wrong and all(answers.values()), (wrong[:3], answers)
        until(lambda: list(engine.runner.adapters) == ["a 0"])
        until(lambda: server.config.app.state.models.lora._engine_has == 1)


def test_a_client_that_leaves_frees_its_adapter(folders):
    with serving(folders) as (url, engine, _):
        step = engine.step

        def slow_step():
            time.sleep(0 if engine.idle else 0.1)
            return step()

        engine.step = slow_step
        with leaving(url, body("a", max_tokens=90)):
            until(lambda: not engine.idle)
        assert unload(url, "a").status_code == 200
        until(lambda: not engine.runner.adapters)
        assert engine.idle


def test_an_adapter_in_use_stays_until_its_request_has_ended(folders, want):
    with serving(folders) as (url, engine, _):
        step, seen = engine.step, []

        def slow_step():
            threading.Event().wait(0 if engine.idle else 0.05)
            seen.append(tuple(engine.runner.adapters))
            return step()

        engine.step = slow_step
        results = []
        thread = threading.Thread(target=lambda: results.append(ask(url, "a")))
        thread.start()
        until(lambda: not engine.idle)
        assert unload(url, "a").status_code == 200
        assert load(url, "a", "b").status_code == 200
        thread.join(60)
        assert results == [want["a"]] and ask(url, "a") == want["b"]
        until(lambda: list(engine.runner.adapters) == ["a 1"])


def test_embeddings_and_scores_are_those_of_the_adapter(folders, want):
    with serving(folders, embeddings=True) as (url, _, _):
        texts = {"input": "some words"}
        vectors = {
            name: HTTP.post(f"{url}/v1/embeddings", json=texts | {"model": name}).json()["data"][0][
                "embedding"
            ]
            for name in ("base", "a")
        }
        again = HTTP.post(f"{url}/v1/embeddings", json=texts | {"model": "a"}).json()
        assert again["data"][0]["embedding"] == vectors["a"] != vectors["base"] and again["model"] == "a"
    with serving(folders) as (url, _, _):
        pair = {"text_1": "some words", "text_2": "and more"}
        scores = [
            HTTP.post(f"{url}/v1/score", json=pair | {"model": name}).json()["data"][0]["score"]
            for name in ("base", "a")
        ]
        assert scores[0] != scores[1]


BROKEN = {
    "kind": {"peft_type": "IA3"},
    "rank": {"r": 0},
    "alpha": {"lora_alpha": float("nan")},
    "much": {"lora_alpha": 1e300},
    "list": {"rank_pattern": ["q_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 0}},
    "pattern": {"rank_pattern": {"(": 4}},
    "bomb": {"rank_pattern": {"((a{1000}){1000}){1000}": 4}},
}


@pytest.mark.parametrize(
    "name, path, words",
    [
        ("c", "../secret", "not below the server's --lora-folder"),
        ("c", "link", "not below the server's --lora-folder"),
        ("c", "/etc", "not below the server's --lora-folder"),
        ("c", ".", "not below the server's --lora-folder"),
        ("c", "b\0", "not below the server's --lora-folder"),
        ("c", "none", "no adapter_config.json"),
        ("base", "b", "there is a model or an adapter 'base' already"),
        ("a", "b", "there is a model or an adapter 'a' already"),
        ("", "b", "lora_name"),
        ("c", "kind", "peft_type is 'IA3'"),
        ("c", "linked", "not below the server's --lora-folder"),
        ("c", "rank", "r is 0"),
        ("c", "alpha", "lora_alpha is nan"),
        ("c", "much", "lora_alpha is 1e+300"),
        ("c", "list", "rank_pattern is ['q_proj']"),
        ("c", "ranks", "rank_pattern['q_proj'] is 0"),
        ("c", "pattern", "rank_pattern: the pattern"),
        ("c", "bomb", "rank_pattern: the pattern"),
    ],
)
def test_wrong_adapters_are_refused_by_name(folders, server_of_one, name, path, words):
    adapter = folders / "all" / path
    if path in BROKEN and not adapter.exists():
        broken(folders / "all" / "b", adapter, **BROKEN[path])
    if path == "linked" and not adapter.exists():
        adapter.mkdir()
        for file in (folders / "secret").iterdir():
            (adapter / file.name).symlink_to(file)
    detail = refused(load(server_of_one, name, path), 400, "invalid_value")
    assert words in detail["message"] and str(folders) not in detail["message"]
    assert "\n" not in detail["message"]


@pytest.fixture(scope="module")
def server_of_one(folders):
    with serving(folders) as (url, _, _):
        yield url


def test_the_number_of_adapters_is_bounded(folders):
    with serving(folders, max_loras=2) as (url, engine, _):
        assert load(url, "b", "b").status_code == 200
        refused(load(url, "c", "b"), 503, "too_many_adapters")
        assert unload(url, "b").status_code == 200
        until(lambda: len(engine.runner.adapters) == 1)
        until(lambda: load(url, "c", "b").status_code == 200)


@pytest.mark.slow
def test_loading_needs_the_flag_and_the_key(folders):
    with serving(folders, folder=False) as (url, _, _):
        assert load(url, "b", "b").status_code == unload(url, "a").status_code == 404
        assert ask(url, "a")
    with serving(folders, api_key=("long-enough",)) as (url, _, _):
        refused(load(url, "b", "b"), 401)
        refused(unload(url, "a"), 401)
        headers = {"Authorization": "Bearer long-enough"}
        assert load(url, "b", "b", headers=headers).status_code == 200


def test_no_key_changes_the_weights_behind_anothers_adapter(folders, want, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: one, key: key-of-one}\n  - {name: two, key: key-of-two}\n"
        "  - {name: operator, key: key-of-operator, adapters: true}\n"
    )
    one, two, operator = ({"Authorization": f"Bearer key-of-{name}"} for name in ("one", "two", "operator"))
    with serving(folders, keys=str(keys)) as (url, _, _):
        before = ids(HTTP.post(f"{url}/v1/completions", json=body("a"), headers=one))
        for headers in (one, two):
            refused(unload(url, "a", headers=headers), 403, "adapters_not_allowed")
            refused(load(url, "b", "b", headers=headers), 403, "adapters_not_allowed")
        assert ids(HTTP.post(f"{url}/v1/completions", json=body("a"), headers=one)) == before
        assert load(url, "b", "b", headers=operator).status_code == 200
        assert unload(url, "b", headers=operator).status_code == 200
    with serving(folders, api_key=("long-enough", "another-one")) as (url, _, _):
        refused(load(url, "b", "b", headers={"Authorization": "Bearer long-enough"}), 403)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"lora": ("a",)}, "NAME=PATH"),
        ({"lora": ("a=x", "a=y")}, "each name once"),
        ({"max_loras": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(SettingsError, match=words):
        LoraSettings(**settings)


def test_servers_that_have_no_adapters_are_refused(folders):
    loras = LoraSettings(lora_folder=str(folders / "all"))
    with pytest.raises(SettingsError, match="a key"):
        serve(str(folders / "model"), ServerSettings(host="0.0.0.0"), lora=loras)
    with pytest.raises(CheckpointError, match="no adapter_config"):
        serve(
            str(folders / "model"),
            ServerSettings(port=0),
            lora=LoraSettings(lora=(f"x={folders / 'model'}",)),
        )
    llm = LLM(str(folders / "model"), runner="modules", kv_tokens=64)
    adapters = first_adapters(LoraSettings(lora=(f"base={folders / 'all' / 'a'}",)), llm.engine.runner)
    backend = EngineBackend(llm.streams())
    with pytest.raises(SettingsError, match="a name that no model has"):
        create_app(
            backend, tokenizer=ServerTokenizer(llm.tokenizer), model="base", lora=loras, adapters=adapters
        )
    asyncio.run(backend.close())


@needs_compiler
def test_the_compiled_step_prepares_an_adapter_while_it_runs(folders):
    """Merging weights takes a while: other requests go on meanwhile."""
    options = {"runner": "compiled", "dtype": "bfloat16"}
    with serving(folders, options=options) as (url, engine, _):
        lora, gate = engine.runner.lora, threading.Event()
        prepare, results = lora.prepare, []

        def slow_prepare(adapter):
            assert threading.current_thread().name == "attar-lora"
            gate.wait(60)
            return prepare(adapter)

        lora.prepare = slow_prepare
        thread = threading.Thread(target=lambda: results.append(load(url, "b", "b")))
        thread.start()
        base, first = ask(url, "base"), ask(url, "a")
        assert base != first and not results
        gate.set()
        thread.join(60)
        assert results[0].status_code == 200
        hits = engine.scheduler.manager.stats.hit
        second = ask(url, "b")
        assert engine.scheduler.manager.stats.hit == hits and second not in (base, first)
        assert [ask(url, name) for name in ("base", "a", "b")] == [base, first, second]
        assert unload(url, "a").status_code == 200
        until(lambda: list(engine.runner.adapters) == ["b 1"])
        assert [ask(url, name) for name in ("base", "b")] == [base, second]


@pytest.mark.slow
def test_an_adapter_stays_while_the_engine_has_a_request_with_it(folders):
    async def run():
        llm = LLM(str(folders / "model"), runner="modules", kv_tokens=256)
        settings = LoraSettings(lora=(f"a={folders / 'all' / 'a'}",))
        (adapter,) = first_adapters(settings, llm.engine.runner)
        backend = EngineBackend(llm.streams())
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        events = AdapterBackend(backend, adapter).submit(PROMPT, params, id="one")
        await anext(events)
        assert not await backend.remove_adapter("a 0")
        assert [event.finish_reason async for event in events][-1] == "length"
        assert await backend.remove_adapter("a 0") and not llm.engine.runner.adapters
        await backend.close()
        llm.engine.check()

    asyncio.run(run())
