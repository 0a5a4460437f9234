"""The server: tools with their types, one client over stdin and stdout, which carry the protocol alone.

Short tools run in threads, long ones one after the other in processes: no tool blocks another.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from attar.errors import AttarError
from attar.mcp import tools
from attar.mcp.folders import Folders
from attar.mcp.process import run_worker
from attar.mcp.results import (
    CheckpointResult,
    EstimateResult,
    EvaluateResult,
    InspectResult,
    PlanResult,
    StatusResult,
)
from attar.printable import one_line
from attar.version import __version__

P = ParamSpec("P")
T = TypeVar("T")

Model = Annotated[str, Field(description="a model: its folder, a .gguf file, or attar:tiny")]
Settings = Annotated[
    dict[str, Any] | None,
    Field(description="other settings of the verb by name, as in attar's docs/settings.md"),
]
Stage = Literal["distill", "train-head", "prune", "recover", "quantize", "merge", "export"]
Method = Literal["rtn", "smoothquant", "awq", "gptq", "gptaq", "qronos", "yaqa", "autoround", "qat"]
LONGEST = 2000  # characters of an error
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
INSTRUCTIONS = (
    "attar makes language models small and measures what that cost. inspect a model, estimate a stage before "
    "you start it, then quantize it and evaluate the result with the original as its reference. A call that "
    "was cancelled goes on where it was when it is repeated with the same arguments."
)
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
WRITES = ToolAnnotations(destructive_hint=False, idempotent_hint=False, open_world_hint=False)


def serve(folders: Folders) -> None:
    """Serve stdin and stdout until the client closes them."""
    os.chdir(folders.roots[0])
    if not folders.hub:
        os.environ.update(OFFLINE)
    with redirect_stdout(sys.__stdout__):  # the protocol's, also with --json
        server_of(folders).run("stdio")


def server_of(folders: Folders) -> MCPServer:
    """The server with its tools."""
    agent = AgentTools(folders)
    server = MCPServer("attar", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    for function in (agent.inspect, agent.plan, agent.estimate, agent.status, agent.evaluate):
        server.add_tool(function, annotations=READS)
    server.add_tool(agent.quantize, annotations=WRITES)
    return server


class AgentTools:
    """The tools on some folders; at most one process works at a time."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._working = anyio.CapacityLimiter(1)

    async def inspect(self, model: Model) -> InspectResult:
        """Describe a checkpoint from its headers: architecture, parameters, bits, lineage, licence duties."""
        return await _in_thread(tools.inspect, self._folders, model)

    async def plan(
        self,
        recipe: Annotated[str, Field(description="a recipe's YAML file")],
        out: Annotated[str | None, Field(description="folder of the run; null: runs/NAME")] = None,
    ) -> PlanResult:
        """Show what a recipe would do now, stage by stage, with about what it takes. Runs nothing."""
        return await _in_thread(tools.plan, self._folders, recipe, out)

    async def estimate(self, model: Model, stage: Stage, settings: Settings = None) -> EstimateResult:
        """Estimate the time, memory and disk of one stage on this machine. Runs nothing."""
        return await _in_thread(tools.estimate, self._folders, model, stage, settings or {})

    async def status(
        self, run: Annotated[str, Field(description="the folder of a run or a sweep")]
    ) -> StatusResult:
        """Show which stages of a run or a sweep are done, at work or waiting."""
        return await _in_thread(tools.status, self._folders, run)

    async def quantize(
        self,
        ctx: Context[Any, Any],
        model: Model,
        out: Annotated[str, Field(description="the new folder")],
        scheme: Annotated[str | None, Field(description="W8A16, W4A16, W3A16, FP8, NVFP4, ...")] = None,
        method: Method | None = None,
        settings: Settings = None,
    ) -> CheckpointResult:
        """Store a model's weights in few bits, in a new folder. Takes minutes to hours; reports progress."""
        chosen = {
            name: value for name, value in (("scheme", scheme), ("method", method)) if value is not None
        }
        values = {**(settings or {}), **chosen}

        def arguments() -> dict[str, Any]:
            self._folders.check(values)
            paths = {"model": self._folders.model(model), "out": str(self._folders.output(out))}
            return {**paths, "settings": values}

        return CheckpointResult.model_validate(await self._work("quantize", arguments, ctx))

    async def evaluate(
        self,
        ctx: Context[Any, Any],
        model: Model,
        reference: Annotated[str | None, Field(description="the model to compare with")] = None,
        settings: Settings = None,
    ) -> EvaluateResult:
        """Measure a model: perplexity, divergence from its reference, size, speed. Reports progress."""

        def arguments() -> dict[str, Any]:
            self._folders.check(settings or {})
            other = None if reference is None else self._folders.model(reference)
            return {"model": self._folders.model(model), "reference": other, "settings": settings or {}}

        measured = await self._work("evaluate", arguments, ctx)
        return EvaluateResult.model_validate({**measured, "measurements": measured})

    async def _work(
        self, tool: str, arguments: Callable[[], Mapping[str, Any]], ctx: Context[Any, Any]
    ) -> dict[str, Any]:
        """Run a tool in a process, when no other one is at work."""
        values = await _in_thread(arguments)
        if self._working.available_tokens < 1:
            await ctx.report_progress(0, None, "waits for the work that was started before")

        async def report(progress: float, line: str) -> None:
            await ctx.report_progress(progress, None, line)

        environment = {} if self._folders.hub else OFFLINE
        async with self._working:
            try:
                folder = self._folders.roots[0]
                return await run_worker(tool, values, report, folder=folder, environment=environment)
            except AttarError as error:
                raise _tool_error(error) from None


async def _in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, which a cancelled call leaves to itself. Raises ToolError."""
    call = functools.partial(function, *args, **kwargs)
    try:
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
    except (AttarError, OSError) as error:
        raise _tool_error(error) from None


def _tool_error(error: AttarError | OSError) -> ToolError:
    """The error that a client reads: one line, which may repeat words of the client's own."""
    return ToolError(one_line(str(error).replace("\nhint: ", "; hint: "))[:LONGEST])
