"""Settings of distillation and of recovery (which is distillation from the unpruned model)."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.errors import SettingsError
from attar.walks.settings import TrainSettings, check_range

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RecoverSettings(TrainSettings):
    """Train a damaged model to agree with its teacher again.

    The loss is ``alpha * T^2 * KL(teacher || student) + (1 - alpha) * cross-entropy``, per predicted token.
    """

    learning_rate: float = field(
        default=2e-4, metadata={"help": "peak learning rate; small, to mend and not to move"}
    )
    temperature: float = field(default=1.0, metadata={"help": "T: softens both distributions in the KL term"})
    alpha: float = field(
        default=1.0, metadata={"help": "weight of the soft loss; 1 - alpha goes to the hard labels"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, 0.01, 100.0, "between 0.01 and 100")
        check_range("alpha", self.alpha, 0.0, 1.0, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class DistillSettings(RecoverSettings):
    """A student with fewer of the teacher's layers, trained on the teacher's distribution."""

    learning_rate: float = field(default=1e-3, metadata={"help": "peak learning rate"})
    layers: int = field(default=0, metadata={"help": "layers of the student; 0: half of the teacher's"})
    layer_map: str = field(
        default="uniform",
        metadata={
            "help": "teacher layers the student starts from: evenly spread, the first and last, or the last",
            "choices": ("uniform", "ends", "last"),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("layers", self.layers, 0, 10_000, "0 (half of the teacher's) or more")
        if self.layer_map not in ("uniform", "ends", "last"):
            raise SettingsError("layer_map", self.layer_map, "uniform, ends or last")
