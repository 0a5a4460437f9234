"""What the tools return, as types that a client reads from their schemas."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class InspectResult(BaseModel):
    """A checkpoint, from its headers and small files."""

    name: str
    path: str
    architecture: str
    model_type: str
    dtype: str
    parameters: int
    bits_per_weight: float = Field(description="stored bits a parameter, scales included")
    disk_bytes: int
    context: int | None = Field(description="tokens")
    kv_bytes_per_token: float | None
    quantization: dict[str, Any] | None = Field(description="method, format and bits of stored codes")
    draft_head: dict[str, Any] | None
    oddities: list[dict[str, str]] = Field(description="what a user should know, and why verbs refuse it")
    stage: str = Field(description="the verb that made it; original without a card")
    command: str = Field(description="a command line that makes it again")
    lineage: dict[str, Any]
    licence: dict[str, Any] = Field(description="duties of who hands it on")
    measurements: dict[str, Any]


class PlannedStage(BaseModel):
    """A stage of a recipe as it would run now."""

    number: int
    name: str
    stage: str
    title: str
    parents: list[str]
    settings: dict[str, Any]
    path: str
    state: str = Field(description="new, changed, half or done")
    evaluated: bool
    seconds_range: tuple[float, float]
    memory_bytes: int
    disk_bytes: int
    scratch_bytes: int


class PlanResult(BaseModel):
    """A recipe's plan; nothing is run."""

    model: str
    out: str
    seconds: float
    seconds_range: tuple[float, float]
    stages: list[PlannedStage]


class EstimateResult(BaseModel):
    """About what a stage takes on this machine."""

    seconds_range: tuple[float, float]
    memory_bytes: int
    disk_bytes: int = Field(description="of the result")
    scratch_bytes: int = Field(description="of the disk while it works")
    free_memory_bytes: int
    free_disk_bytes: int | None


class CheckpointResult(BaseModel):
    """A checkpoint that was written."""

    path: str
    bytes: int
    seconds: float
    numbers: dict[str, float] = Field(description="what the stage measured, such as kl_mean in nats a token")
    licence: dict[str, Any]
    command: str


class EvaluateResult(BaseModel):
    """A model's measurements; those that were not made are null."""

    perplexity: float | None = None
    kl_mean: float | None = Field(default=None, description="to the reference, nats a token")
    top1_agreement: float | None = Field(default=None, description="with the reference")
    quality_kept: float | None = None
    bits_per_weight: float | None = None
    bytes: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    held_out: bool | None = Field(default=None, description="measured on text that no stage has read")
    measurements: dict[str, Any] = Field(description="all of them, as attar evaluate --json prints them")


class StageState(BaseModel):
    """A stage of a run."""

    task: str
    state: str
    attempts: int
    seconds: float
    message: str = ""


class StatusResult(BaseModel):
    """What is done of a run or a sweep."""

    path: str
    process: str | None = Field(description="the process that works on it")
    tasks: list[StageState]
