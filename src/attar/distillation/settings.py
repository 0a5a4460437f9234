"""Settings of distillation and of recovery (distillation from the original model)."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.distillation.layer_map import is_map
from attar.errors import SettingsError, UsageError
from attar.walks.settings import TrainSettings, check_range

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class LearnSettings(TrainSettings):
    """Training on a teacher: ``alpha * T^2 * KL(teacher || student) + (1 - alpha) * cross-entropy``, per
    predicted token."""

    temperature: float = field(default=1.0, metadata={"help": "T: softens both distributions in the KL term"})
    alpha: float = field(
        default=1.0, metadata={"help": "weight of the soft loss; 1 - alpha goes to the hard labels"}
    )
    rows: int = field(
        default=0,
        metadata={"help": "rows of text to learn from, repeated as the steps need; 0: none is seen twice"},
    )
    teacher_top: int = field(
        default=0,
        metadata={
            "help": "K: the teacher is run once for each row, and its K likeliest tokens at each position "
            "are kept on disk, with K / 4 drawn from the rest; 0: it is run in every step, nothing is kept"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("rows", self.rows, 0, 2**40, "0 (as many as the steps take) or more")
        check_range("teacher_top", self.teacher_top, 0, 2**20, "0 (nothing is kept) or more")
        check_range("temperature", self.temperature, 0.01, 100.0, "between 0.01 and 100")
        check_range("alpha", self.alpha, 0.0, 1.0, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class RecoverSettings(LearnSettings):
    """Train a pruned or quantized model to agree with its teacher again, or with ``alpha`` 0 on text without
    a teacher: all weights, or adapters alone."""

    learning_rate: float = field(
        default=2e-4, metadata={"help": "peak learning rate; small, because the model is nearly right"}
    )
    adapter_rank: int = field(
        default=0,
        metadata={
            "help": "rank of LoRA adapters on every Linear of the blocks; the weights, codes included, stay "
            "as they are; 0: all weights are trained"
        },
    )
    adapter_init: str = field(
        default="error",
        metadata={
            "help": "adapters start at the rounding error, teacher - student (LoftQ), or at zero, as they do "
            "without a teacher",
            "choices": ("error", "zero"),
        },
    )
    keep_zeros: str = field(
        default="auto",
        metadata={
            "help": "weights that are zero stay zero, N:M patterns too; auto: those of a pruned model",
            "choices": ("auto", "true", "false"),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_zeros not in ("auto", "true", "false"):
            raise SettingsError("keep_zeros", self.keep_zeros, "auto, true or false")
        check_range("adapter_rank", self.adapter_rank, 0, 2**16, "0 (all weights are trained) or more")
        if self.adapter_init not in ("error", "zero"):
            raise SettingsError("adapter_init", self.adapter_init, "error or zero")

    @property
    def reads_teacher(self) -> bool:
        """Whether a teacher is of use."""
        return self.alpha > 0.0 or (self.adapter_rank > 0 and self.adapter_init == "error")

    def check_alone(self) -> None:
        """Raise where training without a teacher is impossible."""
        if self.alpha > 0.0:
            hint = "--teacher MODEL, or --alpha 0 to learn from the text alone"
            raise UsageError("recover needs a teacher, the model to agree with", hint=hint)


@dataclass(frozen=True, kw_only=True)
class DistillSettings(LearnSettings):
    """A student with fewer of the teacher's layers, trained on the teacher's distribution.

    ``for_drafting`` trains it to have its drafts accepted in speculative decoding (for_drafting.py); with
    ``alpha`` 0 and ``share`` 0 it is trained plainly and reported in the same way, for comparison.
    """

    learning_rate: float = field(default=1e-3, metadata={"help": "peak learning rate"})
    layers: int = field(
        default=0, metadata={"help": "layers of the student; 0: as keep_layers or layer_map has"}
    )
    keep_layers: float = field(
        default=0.5,
        metadata={"help": "fraction of the teacher's layers that the student has, where layers is 0"},
    )
    layer_map: str = field(
        default="uniform",
        metadata={
            "help": "teacher layers the student starts from: uniform (evenly spread), ends (first and last), "
            "last, or their numbers: 0,3,6"
        },
    )

    width: int = field(
        default=0,
        metadata={
            "help": "width of a student that starts afresh, heads and MLP in proportion; 0: the teacher's"
        },
    )
    for_drafting: bool = field(
        default=False, metadata={"help": "train for speculative decoding: accepted tokens count"}
    )
    draft_loss: str = field(
        default="lk",
        metadata={
            "help": "for drafting, the soft loss; tv: refused drafts; lk: kl far from the teacher, tv near",
            "choices": ("lk", "tv", "kl"),
        },
    )
    share: float = field(
        default=0.5, metadata={"help": "for drafting: fraction of the rows that the teacher generates"}
    )
    samples: int = field(
        default=512,
        metadata={"help": "for drafting: rows it generates; repeated where the share asks for more"},
    )
    prompt_tokens: int = field(
        default=32, metadata={"help": "for drafting: tokens of text in front of each row that it generates"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("width", self.width, 0, 2**24, "0 (the teacher's) or more")
        check_range("share", self.share, 0.0, 1.0, "between 0 and 1")
        check_range("samples", self.samples, 1, 2**40, "at least 1")
        check_range("prompt_tokens", self.prompt_tokens, 1, 2**24, "at least 1")
        if self.draft_loss not in ("lk", "tv", "kl"):
            raise SettingsError("draft_loss", self.draft_loss, "lk, tv or kl")
        if self.for_drafting and self.teacher_top:
            raise SettingsError("teacher_top", self.teacher_top, "0 for drafting: its losses read all logits")
        check_range("layers", self.layers, 0, 10_000, "0 (half of the teacher's) or more")
        check_range("keep_layers", self.keep_layers, 0.0, 1.0, "between 0 and 1")
        if not is_map(self.layer_map):
            raise SettingsError("layer_map", self.layer_map, "uniform, ends, last, or numbers as 0,3,6")
