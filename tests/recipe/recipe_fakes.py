"""Stand-ins for stages and measurements: real checkpoints, receipts and keys, work that takes no time.

The stage functions write through :func:`attar.checkpoint.produce`: work folders, cards and renames are real.
``CALLS`` notes who was called; ``FAULTS`` makes the next call of a stage fail where it says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.errors import SettingsError
from attar.recipe.run import Tools
from attar.recipe.stages import StageSpec

VERSION = 1
CALLS: list[str] = []
FAULTS: dict[str, BaseException] = {}

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}


@dataclass(frozen=True, kw_only=True)
class AddSettings:
    """Settings of both stages."""

    amount: float = field(default=1.0, metadata={"help": "what is added"})
    steps: int = field(default=2, metadata={"help": "how often"})
    mode: str = field(default="plain", metadata={"help": "how", "choices": ("plain", "noisy")})
    names: tuple[str, ...] = field(default=(), metadata={"help": "to which"})
    limit: int | None = field(default=None, metadata={"help": "at most"})
    loud: bool = field(default=False, metadata={"help": "say so"})
    data: str = field(default="python-stdlib", metadata={"help": "text"})
    seed: int = field(default=0, metadata={"help": "seed"})

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise SettingsError("amount", self.amount, "0 or more")


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Settings of the evaluation."""

    tokens: int = field(default=64, metadata={"help": "tokens"})
    sequence_length: int = field(default=32, metadata={"help": "tokens of a row"})
    decode_tokens: int = field(default=8, metadata={"help": "tokens"})
    sample_tokens: int = field(default=8, metadata={"help": "tokens"})
    answers: int = field(default=0, metadata={"help": "prompts"})
    speed: bool = field(default=False, metadata={"help": "measure speed"})
    data: str = field(default="python-stdlib", metadata={"help": "text"})
    seed: int = field(default=0, metadata={"help": "seed"})


def add(
    model: Any,
    out: Path,
    settings: AddSettings,
    *,
    progress: Any,
    force: bool = False,
    key: str | None = None,
    teacher: Any = None,
) -> Any:
    """Add ``amount`` to every weight, in ``steps`` steps that can be resumed."""
    source = open_checkpoint(model)
    name = "learn" if teacher is not None else "add"
    signals = [open_checkpoint(teacher)] if teacher is not None else []
    if settings.amount == 13:
        raise SettingsError("amount", settings.amount, "a number that this model likes")
    with produce(out, name, settings, VERSION, [source], signals=signals, force=force, key=key) as output:
        state = output.work / "steps.json"
        done = json.loads(state.read_text()) if state.exists() else 0
        CALLS.append(f"{name} {out.name} from step {done}")
        with progress.task(name, settings.steps, done) as task:
            for step in range(done, settings.steps):
                state.write_text(json.dumps(step + 1))
                task.advance(loss=1 / (step + 1))
                if out.name in FAULTS:
                    raise FAULTS.pop(out.name)
        tensors = load_file(source.weight_files[0])
        changed = {
            key: value + np.float32(settings.amount * settings.steps) for key, value in tensors.items()
        }
        save_file(changed, output.folder / "model.safetensors", metadata={"format": "pt"})
        (output.folder / "config.json").write_text(json.dumps(CONFIG))
        output.details["note"] = f"added {settings.amount}"
    return open_checkpoint(out)


@dataclass
class FakeReference:
    """What :func:`make_reference` gives."""

    kept: bool = True
    nbytes: int = 2


@dataclass
class FakeMeasurements:
    """What :func:`evaluate` gives."""

    mean: float

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON values, with one number that is not finite."""
        return {
            "perplexity": self.mean,
            "kl_mean": 0.5,
            "top1_agreement": 0.9,
            "bytes": 100.0,
            "kl_p99": float("inf"),
        }


def make_reference(model: Any, settings: MeasureSettings, *, progress: Any) -> FakeReference:
    """Note that a reference was made."""
    CALLS.append(f"reference {Path(model).name}")
    return FakeReference()


def evaluate(
    model: Any, settings: MeasureSettings, *, reference: FakeReference, progress: Any
) -> FakeMeasurements:
    """The mean weight stands for the perplexity."""
    assert isinstance(reference, FakeReference)
    name = Path(model).name
    CALLS.append(f"evaluate {name}")
    if f"evaluate {name}" in FAULTS:
        raise FAULTS.pop(f"evaluate {name}")
    tensors = load_file(open_checkpoint(model).weight_files[0])
    return FakeMeasurements(float(np.mean([value.mean() for value in tensors.values()])))


def report(run_dir: Path) -> Path:
    """A report of one line."""
    CALLS.append("report")
    path = run_dir / "report.html"
    path.write_text("<p>done")
    return path


def nothing() -> int:
    """Stands for the memory functions."""
    return 7


HERE = "tests.recipe.recipe_fakes"
TOOLS = Tools(
    evaluate=f"{HERE}:evaluate",
    make_reference=f"{HERE}:make_reference",
    report=f"{HERE}:report",
    reset_peak=f"{HERE}:nothing",
    peak=f"{HERE}:nothing",
)
STAGES = {
    "prune": StageSpec("prune", "Add.", f"{HERE}:AddSettings", f"{HERE}:add", "attar prune x -o y"),
    "recover": StageSpec("recover", "Learn.", f"{HERE}:AddSettings", f"{HERE}:add", "...", teacher=True),
}


def make_model(folder: Path, value: float = 1.0) -> Path:
    """A checkpoint of a few hundred weights, all of them ``value``."""
    folder.mkdir(parents=True)
    names = ["model.embed_tokens.weight"]
    names += [
        f"model.layers.{n}.{part}.weight" for n in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")
    ]
    tensors = {name: np.full((32 if "embed" in name else 8, 8), value, dtype=np.float32) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
