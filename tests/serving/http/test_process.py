"""``attar serve`` as a process of its own: signals, exit codes, what is left of a crowd."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from tests.serving.http.real import COMPLETIONS, body, refused, scraped
from tests.serving.http.test_live import until
from tests.serving.http.vllm.programs import asked, install

pytestmark = pytest.mark.slow


@contextmanager
def process(folder, *options):
    """The address and the process; its log is in the folder."""
    command = [sys.executable, "-m", "attar.cli.main", "serve", "attar:tiny", "--port", "0", "--name", "tiny"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("w")
    child = subprocess.Popen([*command, *options], stderr=log, env=environment)
    try:
        until(lambda: child.poll() is not None or "http://" in first_lines(folder), 120)
        url = re.search(r"^http://\S+", first_lines(folder), re.MULTILINE)[0]
        until(lambda: ready(url), 120)
        yield url, child
    finally:
        child.kill()
        child.wait()


def first_lines(folder):
    return (folder / "log").read_text()


def ready(url):
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.ConnectError:
        return False


async def load(url, clients, then, **more):
    """Streams, and something that is done when the first of them have begun."""
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        asked = body(stream=True, **more)

        async def one():
            try:
                return await http.post(url + COMPLETIONS, json=asked)
            except httpx.HTTPError as error:
                return error

        tasks = [asyncio.create_task(one()) for _ in range(clients)]
        while scraped(url).get("time_to_first_token_seconds_count", 0) < 3:
            await asyncio.sleep(0.02)
        first_lines = await then(http)
        return await asyncio.gather(*tasks), first_lines


def test_vllm_behind_the_server_and_its_end(tmp_path, monkeypatch):
    """attar:tiny by a fake vLLM: lines, answers, and SIGTERM ends both."""
    log = install(tmp_path, monkeypatch)
    with process(tmp_path, "--engine", "vllm --seed 3", "--kv-dtype", "fp8") as (url, child):
        assert re.search(r"^weights +dense$", first_lines(tmp_path), re.MULTILINE)
        assert httpx.post(url + COMPLETIONS, json=body()).json()["choices"][0]["text"] == "one two three"
        assert httpx.get(f"{url}/attar/state").json()["kv_dtype"] == "fp8"
        options = asked(log)[0]["options"]
        assert options[options.index("--kv-cache-dtype") + 1] == "fp8" and "--seed" in options
        socket = options[-1]
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0 and not Path(socket).exists()


def test_sigterm_while_vllm_loads_ends_both(tmp_path, monkeypatch):
    log = install(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "attar.cli.main", "serve", "attar:tiny", "--port", "0"]
    child = subprocess.Popen([*command, "--engine", "vllm --hang"], stderr=subprocess.DEVNULL)
    until(log.exists, 120)
    folder = Path(asked(log)[0]["options"][-1]).parent
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 128 + signal.SIGTERM and not folder.exists()


def limits(folder, **values):
    """The options of a file of limits."""
    file = folder / "limits.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    return ("--limits", str(file))


def test_the_first_lines_say_what_runs(tmp_path):
    with process(tmp_path) as (url, _):
        lines = first_lines(tmp_path).splitlines()
        before = lines[: lines.index(url)]
        for name in ("model", "runner", "threads", "kv cache", "context", "speculation", "chat"):
            assert sum(line.startswith(name) for line in before) == 1, lines
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["runtime"]["runner"] in ("compiled", "modules")


def test_sigterm_under_load(tmp_path):
    with process(tmp_path, *limits(tmp_path, drain_s=50)) as (url, child):

        async def end(http):
            child.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            return await http.post(url + COMPLETIONS, json=body())

        answers, late = asyncio.run(load(url, 30, end, max_tokens=100))
        refused(late, 503, "shutting_down")
        assert all(isinstance(answer, httpx.Response) and "[DONE]" in answer.text for answer in answers), (
            answers
        )
        assert child.wait(10) == 0 and "Traceback" not in first_lines(tmp_path)


@pytest.mark.parametrize("signals", [1, 2])
def test_an_end_before_all_are_out(signals, tmp_path):
    """The time is over, or the second signal comes: all requests get an error, the process ends at once."""
    with process(tmp_path, *limits(tmp_path, drain_s=1 if signals == 1 else 60)) as (url, child):

        async def end(http):
            for _ in range(signals):
                child.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)

        began = time.monotonic()
        answers, _ = asyncio.run(load(url, 40, end, max_tokens=1900))
        assert child.wait(10) == 0 and time.monotonic() - began < 20
        assert sum("shutting_down" in answer.text for answer in answers) > 10
        assert "Traceback" not in first_lines(tmp_path)
