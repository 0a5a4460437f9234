"""``attar mcp`` through the client of the mcp package: types, progress, cancellation, errors in one line."""

import json
import os
import sys
from pathlib import Path

import anyio
import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters, stdio_client

from attar.mcp import process, worker
from attar.mcp.folders import Folders
from attar.mcp.server import server_of
from attar.recipe.machine import Rates
from tests.syntax import ROOT

TOOLS = {"inspect", "plan", "estimate", "status", "quantize", "evaluate"}
RECIPE = "model: attar:tiny\ndata: text.txt\nevaluate: false\nstages: [{stage: quantize, group_size: 64}]\n"


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Run a coroutine with a client of a server on ``tmp_path``, whose worker is a stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "WORKER", "tests.mcp.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(ROOT.parents[1]))

    def run(use):
        async def main():
            async with Client(server_of(Folders.of([str(tmp_path)], hub=False))) as client:
                with anyio.fail_after(60):
                    return await use(client)

        return anyio.run(main)

    return run


async def cancelled(client, arguments, progress, scope):
    """Quantize until a scope is cancelled."""
    with scope:
        await client.call_tool("quantize", arguments, progress_callback=progress)


def done_of(message):
    return int(message.split()[1].partition("/")[0])


def text_of(result):
    assert result.is_error
    return result.content[0].text


def test_the_tools_have_types(session):
    async def use(client):
        return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in session(use)}
    assert set(tools) == TOOLS
    for tool in tools.values():
        assert tool.description and "ctx" not in tool.input_schema["properties"]
        assert tool.output_schema["type"] == "object" and tool.output_schema["properties"]
    assert tools["quantize"].input_schema["required"] == ["model", "out"]
    reading = {name for name, tool in tools.items() if tool.annotations.read_only_hint}
    assert reading == TOOLS - {"quantize"}


def test_short_tools_answer_with_their_types(session, tmp_path, monkeypatch):
    monkeypatch.setattr("attar.recipe.plan.measure_rates", lambda: Rates(1e9, 1e9, 1e6))
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "run").mkdir()
    plan = {"attar": "1", "folders": ["01-quantize"], "stages": []}
    (tmp_path / "run" / "run.json").write_text(json.dumps(plan))

    async def use(client):
        calls = [
            ("inspect", {"model": "attar:tiny"}),
            ("plan", {"recipe": "r.yaml"}),
            ("estimate", {"model": "attar:tiny", "stage": "quantize", "settings": {"data": "text.txt"}}),
            ("status", {"run": "run"}),
        ]
        return [(await client.call_tool(*call)).structured_content for call in calls]

    inspected, planned, estimated, status = session(use)
    assert (inspected["name"], inspected["parameters"]) == ("attar:tiny", 6_820_096)
    assert [stage["state"] for stage in planned["stages"]] == ["new"]
    assert planned["out"] == str(tmp_path / "runs" / "r")
    assert 0 < estimated["seconds_range"][0] <= estimated["seconds_range"][1]
    assert estimated["free_memory_bytes"] > 0 and estimated["disk_bytes"] > 0
    assert [(task["task"], task["state"]) for task in status["tasks"]] == [("01-quantize", "waiting")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "r.yaml",
        "run",
        "text.txt",
    ]  # nothing was written


def test_errors_are_one_line(session):
    calls = [
        ("inspect", {"model": "/etc"}, "outside of the folders of this server; hint: paths below"),
        ("inspect", {"model": "nothing"}, "no such model folder"),
        ("inspect", {}, "model"),
        ("plan", {"recipe": "nothing.yaml"}, "no such recipe"),
        ("estimate", {"model": "attar:tiny", "stage": "quantise"}, "stage"),
        ("estimate", {"model": "attar:tiny", "stage": "quantize", "settings": {"shceme": 1}}, "scheme"),
        ("status", {"run": "."}, "neither a run nor a sweep"),
        ("status", {"run": "x" * 5000}, ""),
        ("quantize", {"model": "attar:tiny", "out": "../o"}, "outside"),
        ("quantize", {"model": "attar:tiny", "out": "o", "settings": {"data": "/etc/passwd"}}, "outside"),
        ("quantize", {"model": "attar:tiny", "out": "o", "settings": {"fail": True}}, "no text in it; hint:"),
        ("quantize", {"model": "attar:tiny", "out": "o", "settings": {"die": True}}, "ended with code -9"),
        ("quantise", {}, "quantise"),
    ]

    async def use(client):
        for name, arguments, words in calls:
            text = text_of(await client.call_tool(name, arguments))
            assert words in text, (name, text)
            assert len(text) < 2100
            if name != "quantise" and "validation" not in text:
                assert "\n" not in text
        assert (await client.call_tool("inspect", {"model": "attar:tiny"})).structured_content

    session(use)


def test_long_work_reports_is_cancelled_and_goes_on_and_blocks_nobody(session, tmp_path):
    slow = {"model": "attar:tiny", "out": "o", "settings": {"steps": 40, "seconds": 0.05}}
    heard, other = [], []

    async def use(client):
        started = anyio.Event()

        async def progress(value, total, message):
            heard.append((value, message))
            if message.startswith("count 2/"):
                started.set()

        async with anyio.create_task_group() as group:
            group.start_soon(cancelled, client, slow, progress, scope := anyio.CancelScope())
            await started.wait()
            other.append(await client.call_tool("inspect", {"model": "attar:tiny"}))
            scope.cancel()
        slow["settings"]["seconds"] = 0
        return await client.call_tool("quantize", slow)

    result = session(use).structured_content
    assert other[0].structured_content["name"] == "attar:tiny"
    assert 2 <= result["numbers"]["first"] < 40  # it went on where it was
    assert (result["bytes"], result["path"]) == (40, str(tmp_path / "o"))
    values = [value for value, _ in heard]
    assert values == sorted(set(values)) and heard[0][1] == "from 0"


def test_what_a_worker_raises_is_its_last_line(capfd):
    request = {"tool": "nothing", "arguments": {}}
    assert worker._answer(request, None)["error"].startswith("this is a bug of attar: KeyError")
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.slow
def test_one_process_works_at_a_time(session, tmp_path):
    settings = {"steps": 4, "seconds": 0.02}
    lines = []

    async def use(client):
        async def progress(value, total, message):
            lines.append(message)

        async with anyio.create_task_group() as group:
            for out in ("a", "b"):
                call = {"model": "attar:tiny", "out": out, "settings": settings}
                group.start_soon(client.call_tool, "quantize", call, None, progress)

    session(use)
    assert "waits for the work that was started before" in lines
    counts = [line for line in lines if line.startswith("count")]
    assert counts.index("count 4/4  loss 0.3333") < len(counts) - 4  # the first had ended before


@pytest.mark.slow
def test_a_real_model_over_stdin_and_stdout(tmp_path):
    """The command: a quantization that is cancelled, goes on and is measured; then the client leaves."""
    command = ["-m", "attar", "mcp", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    settings = {"group_size": 64, "data": "python-stdlib"}
    call = {"model": "attar:tiny", "out": "w4", "scheme": "W4A16", "method": "gptq", "settings": settings}
    heard, work = [], tmp_path / ".w4.work"

    async def main():
        async with Client(stdio_client(server)) as client:
            begun = anyio.Event()

            async def progress(value, total, message):
                heard.append((message, len(list(work.rglob("block-*.safetensors")))))
                if message.startswith("gptq ") and done_of(message) >= 2:
                    begun.set()

            async with anyio.create_task_group() as group:
                group.start_soon(cancelled, client, call, progress, scope := anyio.CancelScope())
                await begun.wait()
                scope.cancel()
            heard.clear()
            made = await client.call_tool("quantize", call, progress_callback=progress)
            again = await client.call_tool("quantize", call)
            arguments = {
                "model": "w4",
                "reference": "attar:tiny",
                "settings": {"tokens": 512, "speed": False},
            }
            return made, again, await client.call_tool("evaluate", arguments)

    made, again, measured = anyio.run(main)
    blocks = [count for message, count in heard if message.startswith("gptq ")]
    assert blocks[0] >= 2  # the blocks that were done are there
    assert Path(made.structured_content["path"]) == tmp_path / "w4"
    assert made.structured_content["numbers"]["kl_mean"] > 0
    assert "already exists" in text_of(again)
    assert 0 < measured.structured_content["kl_mean"] < 1
    assert measured.structured_content["measurements"]["perplexity"] > 1
