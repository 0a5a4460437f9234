"""Settings of distillation and of recovery (distillation from the original model). Free of torch.

A soft loss has its own options (``LOSS_SETTINGS``); all options are one flat list for recipes and commands
(:mod:`attar.options`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from attar.checkpoint.licence_gate import LicenceSettings
from attar.distillation.feature_settings import FeatureSettings, StudentFeatureSettings
from attar.distillation.student_settings import StudentSettings
from attar.errors import SettingsError, UsageError
from attar.options import check_choices, nest, setting
from attar.walks.settings import TrainSettings, check_range

VERSION = 6
PROMPT_TOKENS = 32


def _adapter_rank() -> Any:
    return setting(
        0,
        "rank of LoRA adapters on every Linear of the blocks; the weights, codes included, stay as they are; "
        "0: all weights are trained",
    )


def _check_adapters(settings: Any) -> None:
    check_range("adapter_rank", settings.adapter_rank, 0, 2**16, "0 (all weights are trained) or more")


@dataclass(frozen=True, kw_only=True)
class SoftLossSettings:
    """Options of a soft loss without any."""

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class JSDSettings(SoftLossSettings):
    """The generalized Jensen-Shannon divergence between teacher and student."""

    beta: float = setting(
        0.5,
        "jsd: weight of the teacher in the mixture that both are compared with, near 0 forward KL, near 1 "
        "reverse; skew-kl, skew-reverse-kl: weight of the first distribution in the mixture that it is "
        "compared with, 0.1 by default",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0.0, 1.0, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class SkewSettings(SoftLossSettings):
    """KL to a mixture of both models."""

    beta: float = setting(0.1, "weight of the first distribution in the mixture that it is compared with")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0.0, 0.999, "from 0 to below 1")


LOSS_SETTINGS: dict[str, type] = {
    "auto": SoftLossSettings,
    "kl": SoftLossSettings,
    "reverse-kl": SoftLossSettings,
    "jsd": JSDSettings,
    "skew-kl": SkewSettings,
    "skew-reverse-kl": SkewSettings,
    "tv": SoftLossSettings,
    "lk": SoftLossSettings,
    "hard": SoftLossSettings,
    "sft": SoftLossSettings,
    "none": SoftLossSettings,
    "policy-gradient": SoftLossSettings,
    "minillm": SoftLossSettings,
}
"""The options of each objective; its function is in attar.distillation.objectives, or in policy."""

POLICIES = ("policy-gradient", "minillm")  # they learn from the student's own text alone


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """What of the teacher's predictions the student gets."""

    teacher_top: int = setting(
        0,
        "K: the teacher is run once for each row, and its K likeliest tokens at each position are kept on "
        "disk, with some drawn from the rest; 0: none of them",
    )
    teacher_samples: int = setting(
        0,
        "N: tokens drawn at each position, from those beyond the teacher_top, or from all without one; 0: a "
        "quarter of teacher_top",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("teacher_top", self.teacher_top, 0, 2**20, "0 (none) or more")
        check_range("teacher_samples", self.teacher_samples, 0, 2**20, "0 or more")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Rows that the student writes, and learns from."""

    student_generated: float | None = setting(
        None, "fraction of the batches that the student itself writes; none: 1 where the objective needs it"
    )
    rollout_every: int = setting(8, "steps between two times that the student writes")

    def __post_init__(self) -> None:
        allowed = "between 0 and 1"
        check_range("student_generated", self.student_generated or 0.0, 0.0, 1.0, allowed)
        check_range("rollout_every", self.rollout_every, 1, 2**40, "at least 1")


@dataclass(frozen=True, kw_only=True)
class TeacherRowSettings:
    """Rows that the teacher writes, and another model learns from."""

    teacher_generated: float | None = setting(
        None, "fraction of the rows that the teacher generates; none: half for drafting, else 0"
    )
    num_rollouts: int = setting(512, "rows that the teacher generates, repeated where more are needed")
    prompt_tokens: int = setting(PROMPT_TOKENS, "tokens of text in front of each row that is generated")
    rollout_temperature: float | None = setting(
        None, "temperature at which rows are generated; none: that of the loss"
    )

    def __post_init__(self) -> None:
        check_range("teacher_generated", self.teacher_generated or 0.0, 0.0, 1.0, "between 0 and 1")
        check_range("num_rollouts", self.num_rollouts, 1, 2**40, "at least 1")
        check_range("prompt_tokens", self.prompt_tokens, 1, 2**24, "at least 1")
        temperature = 1.0 if self.rollout_temperature is None else self.rollout_temperature
        check_range("rollout_temperature", temperature, 0.01, 100.0, "between 0.01 and 100")


@dataclass(frozen=True, kw_only=True)
class RowSettings(TrainSettings):
    """Training on rows of text, or on those that a model writes."""

    rows: int = setting(0, "rows of text to learn from, repeated as the steps need; 0: none is seen twice")
    licence: LicenceSettings = field(default_factory=LicenceSettings, metadata={"title": "Licences"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        check_range("rows", self.rows, 0, 2**40, "0 (as many as the steps take) or more")

    @property
    def answers_only(self) -> bool:
        """Whether only the assistant's tokens of a conversation are learned."""
        return False


@dataclass(frozen=True, kw_only=True)
class LearnSettings(RowSettings):
    """Training on a teacher: ``alpha * soft loss + (1 - alpha) * cross-entropy``, per predicted token, and
    what is compared inside the models."""

    objective: str = setting(
        "auto",
        "the soft loss: kl (forward), reverse-kl, jsd, skew-kl, skew-reverse-kl, tv, lk (kl far from the "
        "teacher, tv near); of text alone, without a teacher: hard (cross-entropy), sft (of the answers of "
        "conversations, which a teacher wrote); none (what features compare, alone); of the student's own "
        "text: policy-gradient, minillm; auto: kl, and lk for drafting",
        tuple(LOSS_SETTINGS),
    )
    alignment: ClassVar[str] = "auto"
    loss: SoftLossSettings = field(
        default_factory=SoftLossSettings, metadata={"variants": LOSS_SETTINGS, "by": "objective"}
    )
    temperature: float = setting(1.0, "T: softens both distributions in the soft loss")
    alpha: float = setting(1.0, "weight of the soft loss; 1 - alpha goes to the hard labels")
    predictions: PredictionSettings = field(default_factory=PredictionSettings)
    task: str = setting(
        "auto",
        "what is predicted: causal (next tokens), masked (hidden tokens), classification (labels); auto: as "
        "the model's architecture says",
        ("auto", "causal", "masked", "classification"),
    )
    features: FeatureSettings = field(
        default_factory=FeatureSettings, metadata={"title": "Inside the network"}
    )
    rollouts: RolloutSettings = field(default_factory=RolloutSettings, metadata={"title": "Generated text"})
    predict: str = setting(
        "auto",
        "tokens of a conversation that are learned: answers (the assistant's), all; auto: answers with "
        "objective sft, else all",
        ("auto", "all", "answers"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, 0.01, 100.0, "between 0.01 and 100")
        check_range("alpha", self.alpha, 0.0, 1.0, "between 0 and 1")
        if self.features.features and self.objective == "sft":
            names = ",".join(self.features.features)
            raise SettingsError("features", names, "left out with objective sft: no teacher runs")
        if self.objective == "none" and not self.features.features:
            raise SettingsError("objective", self.objective, "one of predictions without features")
        self._check_kept()
        self._check_rollouts()

    def _check_kept(self) -> None:
        """Raise where predictions are kept that the loss cannot use."""
        for name in ("teacher_top", "teacher_samples"):
            value = getattr(self.predictions, name)
            if value and (self.objective in ("sft", "none") or self.soft_loss not in ("kl", "hard")):
                allowed = f"0 with objective {self.objective if self.objective != 'auto' else self.soft_loss}"
                raise SettingsError(name, value, allowed)
            if value and self.features.features:
                raise SettingsError(name, value, "0 with features: intermediates are not kept on disk")

    @property
    def keeps_predictions(self) -> bool:
        """Whether the teacher's predictions are kept on disk."""
        return self.predictions.teacher_top > 0 or self.predictions.teacher_samples > 0

    def _check_rollouts(self) -> None:
        """Refuse what makes no sense with text that the student writes."""
        share, name = self.rollouts.student_generated, self.soft_loss
        if name in POLICIES and share not in (None, 1.0):
            allowed = f"1 with objective {name}: it learns from drawn tokens"
            raise SettingsError("student_generated", share, allowed)
        if not self.student_share:
            return
        if name == "hard" or self.alpha < 1.0:
            allowed = "1 with student_generated: the student's own text is no label"
            raise SettingsError("alpha", self.alpha, allowed)
        if self.keeps_predictions:
            allowed = "0 with student_generated: its rows are new each time"
            raise SettingsError("teacher_top", self.predictions.teacher_top, allowed)
        if name in POLICIES and self.rollout_temperature != self.temperature:
            allowed = f"that of the loss, {self.temperature:g}, with objective {name}"
            raise SettingsError("rollout_temperature", self.rollout_temperature, allowed)

    @property
    def student_share(self) -> float:
        """Fraction of the batches that the student writes."""
        share = self.rollouts.student_generated
        return float(self.soft_loss in POLICIES) if share is None else share

    @property
    def rollout_temperature(self) -> float:
        """Temperature at which rows are generated."""
        return self.temperature

    @property
    def prompt_tokens(self) -> int:
        """Tokens of text in front of each row that is generated."""
        return PROMPT_TOKENS

    @property
    def soft_loss(self) -> str:
        """The objective, ``auto`` resolved: a name of attar.distillation.objectives.OBJECTIVES."""
        return {"auto": "kl", "none": "kl", "sft": "hard"}.get(self.objective, self.objective)

    @property
    def prediction_weight(self) -> float:
        """Weight of the loss on predictions beside that of the features."""
        return float(self.objective != "none")

    @property
    def learns_softly(self) -> bool:
        """Whether the teacher's predictions are in the loss."""
        return self.alpha > 0.0 and self.soft_loss != "hard"

    @property
    def teacher_signal(self) -> str:
        """Where the teacher's predictions come from: a name of attar.distillation.signals.SIGNALS."""
        if not self.learns_softly:
            return "online" if self.features.features else "text"
        if self.soft_loss in POLICIES:
            return "policy"
        return "cached" if self.keeps_predictions else "online"

    @property
    def answers_only(self) -> bool:
        """Whether only the assistant's tokens of a conversation are learned."""
        return self.objective == "sft" if self.predict == "auto" else self.predict == "answers"

    @property
    def runs_teacher(self) -> bool:
        """Whether a teacher is of use to the loss."""
        return self.teacher_signal != "text" or bool(self.features.features)


@dataclass(frozen=True, kw_only=True)
class RecoverSettings(LearnSettings):
    """Train a pruned or quantized model to agree with its teacher again, or with ``alpha`` 0 on text without
    a teacher: all weights, or adapters alone."""

    learning_rate: float = setting(2e-4, "peak learning rate; small, because the model is nearly right")
    adapter_rank: int = _adapter_rank()
    adapter_init: str = setting(
        "error",
        "adapters start at the rounding error, teacher - student (LoftQ), or at zero, as they do without a "
        "teacher",
        ("error", "zero"),
    )
    keep_zeros: str = setting(
        "auto",
        "weights that are zero stay zero, N:M patterns too; auto: those of a pruned model",
        ("auto", "true", "false"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adapters(self)

    @property
    def reads_teacher(self) -> bool:
        """Whether a teacher is of use."""
        return self.runs_teacher or (self.adapter_rank > 0 and self.adapter_init == "error")

    def check_alone(self) -> None:
        """Raise where training without a teacher is impossible."""
        if self.runs_teacher:
            less = "no --features and --alpha 0" if self.features.features else "--alpha 0"
            hint = f"--teacher MODEL, or {less} to learn from the text alone"
            raise UsageError("recover needs a teacher, the model to agree with", hint=hint)


@dataclass(frozen=True, kw_only=True)
class DistillSettings(LearnSettings):
    """A student made of the teacher, or given, and trained on the teacher's distribution.

    ``for_drafting`` trains it to have its drafts accepted in speculative decoding (for_drafting.py); with
    ``alpha`` 0 and ``teacher_generated`` 0 it is trained plainly and reported in the same way, for
    comparison.
    """

    learning_rate: float = setting(1e-3, "peak learning rate")
    adapter_rank: int = _adapter_rank()
    features: StudentFeatureSettings = field(
        default_factory=StudentFeatureSettings, metadata={"title": "Inside the network"}
    )
    alignment: str = setting(  # type: ignore[misc]
        "auto",
        "how predictions are compared where the teacher has another tokenizer: gold (tokens with the same "
        "bytes by the objective, the rest sorted), uld (all sorted); auto: gold",
        ("auto", "gold", "uld"),
    )
    teacher_rows: TeacherRowSettings = field(
        default_factory=TeacherRowSettings, metadata={"title": "Generated text"}
    )
    student: StudentSettings = field(default_factory=StudentSettings, metadata={"title": "The student"})
    for_drafting: bool = setting(
        False, "train for speculative decoding: accepted tokens count, half of the rows are the teacher's own"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adapters(self)

    @property
    def teacher_share(self) -> float:
        """Fraction of the rows that the teacher generates."""
        share = self.teacher_rows.teacher_generated
        return 0.5 * self.for_drafting if share is None else share

    @property
    def rollout_temperature(self) -> float:
        """See :class:`LearnSettings`."""
        temperature = self.teacher_rows.rollout_temperature
        return self.temperature if temperature is None else temperature

    @property
    def prompt_tokens(self) -> int:
        """See :class:`LearnSettings`."""
        return self.teacher_rows.prompt_tokens

    @property
    def soft_loss(self) -> str:
        """See :class:`LearnSettings`; ``lk`` for drafting."""
        return "lk" if self.for_drafting and self.objective == "auto" else super().soft_loss


def distill_settings(**options: Any) -> DistillSettings:
    """Settings from flat options, as recipes and commands have them: ``objective="jsd", beta=0.1``.

    Raises:
        SettingsError: a value is not allowed, or the objective does not take the option.
    """
    return nest(DistillSettings, options)


def recover_settings(**options: Any) -> RecoverSettings:
    """The same for recovery."""
    return nest(RecoverSettings, options)
