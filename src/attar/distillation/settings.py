"""Settings of distillation and of recovery (distillation from the original model). Free of torch.

A soft loss has its own options (``LOSS_SETTINGS``); all options are one flat list for recipes and commands
(:mod:`attar.options`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.licence_gate import LicenceSettings
from attar.distillation.feature_settings import FeatureSettings
from attar.distillation.head_settings import HEAD_SETTINGS, DraftHeadSettings, NoHeadSettings, check_head
from attar.distillation.student_settings import StudentSettings
from attar.errors import SettingsError, UsageError
from attar.options import check_choices, nest
from attar.walks.settings import TrainSettings, check_range

VERSION = 5


def _option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


def _adapter_rank() -> Any:
    return _option(
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

    beta: float = _option(
        0.5, "weight of the teacher in the mixture both are compared with: near 0 forward KL, near 1 reverse"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0.0, 1.0, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class SkewSettings(SoftLossSettings):
    """KL to a mixture of both models."""

    skew: float = _option(0.1, "share of the first distribution in the mixture that it is compared with")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("skew", self.skew, 0.0, 0.999, "from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class PolicySettings(SoftLossSettings):
    """A loss of the student's own text, by policy gradient of the reverse KL."""

    discount: float = _option(
        0.0, "weight of the next token's reward in a token's own: 0 to 1; minillm: 1 by its paper"
    )
    clip_ratio: float = _option(
        0.0, "PPO's clip of the probability ratio to rows that are some steps old; 0: none"
    )
    reward_clip: float = _option(
        0.0, "largest log ratio of teacher and student that a token is rewarded with; 0: any"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("discount", self.discount, 0.0, 1.0, "between 0 and 1")
        check_range("clip_ratio", self.clip_ratio, 0.0, 0.999, "from 0 (none) to below 1")
        check_range("reward_clip", self.reward_clip, 0.0, 1e6, "0 (any) or more")


@dataclass(frozen=True, kw_only=True)
class MiniLLMSettings(PolicySettings):
    """MiniLLM's loss, with a switch for each of its parts."""

    discount: float = _option(1.0, "weight of the next token's reward in a token's own")
    clip_ratio: float = _option(0.2, "PPO's clip of the probability ratio; 0: none")
    reward_clip: float = _option(10.0, "largest log ratio of teacher and student in a reward; 0: any")
    single_step: bool = _option(True, "a token's own reward is summed over the vocabulary, not sampled")
    teacher_mix: float = _option(0.2, "weight of the teacher in the law that rows are drawn from")
    importance: str = _option(
        "token",
        "what corrects for drawing with the teacher: token (its own ratio), prefix (exact), none",
        ("token", "prefix", "none"),
    )
    length_norm: bool = _option(True, "later rewards are averaged, not summed")
    whiten: bool = _option(False, "advantages of a batch get mean 0 and variance 1")
    lm_weight: float = _option(1.0, "weight of the cross-entropy of as many rows of text; 0: none is read")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("teacher_mix", self.teacher_mix, 0.0, 0.999, "from 0 to below 1")
        check_range("lm_weight", self.lm_weight, 0.0, 1e6, "0 or more")


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
    "policy-gradient": PolicySettings,
    "minillm": MiniLLMSettings,
}
"""The options of each objective; its function is in attar.distillation.objectives, or in policy."""

POLICIES = ("policy-gradient", "minillm")  # they learn from the student's own text alone


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """What of the teacher's predictions the student gets."""

    teacher_top: int = _option(
        0,
        "K: the teacher is run once for each row, and its K likeliest tokens at each position are kept on "
        "disk, with some drawn from the rest; 0: none of them",
    )
    teacher_samples: int = _option(
        0,
        "N: tokens drawn at each position, from those beyond the teacher_top, or from all without one; 0: a "
        "quarter of teacher_top",
    )
    alignment: str = _option(
        "auto",
        "how predictions are compared where the teacher has another tokenizer: gold (tokens with the same "
        "bytes by the objective, the rest sorted), uld (all sorted); auto: gold",
        ("auto", "gold", "uld"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("teacher_top", self.teacher_top, 0, 2**20, "0 (none) or more")
        check_range("teacher_samples", self.teacher_samples, 0, 2**20, "0 or more")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Rows that a model writes, and the student learns from."""

    share: float | None = _option(
        None,
        "fraction of the rows that the teacher generates; none: all for a draft head, half for drafting, "
        "else 0",
    )
    samples: int = _option(512, "rows it generates; repeated where the share asks for more")
    prompt_tokens: int = _option(32, "tokens of text in front of each row that is generated")
    on_policy: float | None = _option(
        None, "fraction of the batches that the student itself writes; none: 1 where the objective needs it"
    )
    rollout_every: int = _option(8, "steps between two times that the student writes")
    staleness: int = _option(
        0, "most steps that its rows are used for; 0: until it writes again, more: fewer are written"
    )
    rollout_tokens: int = _option(0, "most tokens that it writes in a row; 0: until the row is full")
    rollout_temperature: float | None = _option(
        None, "temperature at which rows are generated; none: that of the loss"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("share", self.share or 0.0, 0.0, 1.0, "between 0 and 1")
        check_range("samples", self.samples, 1, 2**40, "at least 1")
        check_range("prompt_tokens", self.prompt_tokens, 1, 2**24, "at least 1")
        check_range("on_policy", self.on_policy or 0.0, 0.0, 1.0, "between 0 and 1")
        check_range("rollout_every", self.rollout_every, 1, 2**40, "at least 1")
        check_range("rollout_tokens", self.rollout_tokens, 0, 2**24, "0 (a full row) or more")
        if self.rollout_temperature is not None:
            allowed = "between 0.01 and 100"
            check_range("rollout_temperature", self.rollout_temperature, 0.01, 100.0, allowed)
        if self.staleness and self.staleness < self.rollout_every:
            allowed = f"0, or at least rollout_every, {self.rollout_every}"
            raise SettingsError("staleness", self.staleness, allowed)
        check_range("staleness", self.staleness, 0, 2**40, "0 (until it writes again) or more")


@dataclass(frozen=True, kw_only=True)
class LearnSettings(TrainSettings):
    """Training on a teacher: ``alpha * soft loss + (1 - alpha) * cross-entropy``, per predicted token, and
    what is compared inside the models."""

    objective: str = _option(
        "auto",
        "the soft loss: kl (forward), reverse-kl, jsd, skew-kl, skew-reverse-kl, tv, lk (kl far from the "
        "teacher, tv near), hard (cross-entropy alone, no teacher is run); of the student's own text: "
        "policy-gradient, minillm; auto: kl, and lk for drafting",
        tuple(LOSS_SETTINGS),
    )
    loss: SoftLossSettings = field(
        default_factory=SoftLossSettings, metadata={"variants": LOSS_SETTINGS, "by": "objective"}
    )
    temperature: float = _option(1.0, "T: softens both distributions in the soft loss")
    alpha: float = _option(1.0, "weight of the soft loss; 1 - alpha goes to the hard labels")
    signal: str = _option(
        "auto",
        "where the teacher's predictions come from: online (it is run in every step), cached (once for each "
        "row, see teacher_top), text (none: the text is what it wrote); auto: cached with a teacher_top or "
        "teacher_samples",
        ("auto", "online", "cached", "text"),
    )
    predictions: PredictionSettings = field(default_factory=PredictionSettings)
    rows: int = _option(0, "rows of text to learn from, repeated as the steps need; 0: none is seen twice")
    task: str = _option(
        "auto",
        "what is predicted: causal (next tokens), masked (hidden tokens), classification (labels); auto: as "
        "the model's architecture says",
        ("auto", "causal", "masked", "classification"),
    )
    features: FeatureSettings = field(
        default_factory=FeatureSettings, metadata={"title": "Inside the network"}
    )
    rollouts: RolloutSettings = field(default_factory=RolloutSettings, metadata={"title": "Generated text"})
    predict: str = _option(
        "auto",
        "tokens of a conversation that are learned: answers (the assistant's), all; auto: answers with "
        "signal text, else all",
        ("auto", "all", "answers"),
    )
    licence: LicenceSettings = field(default_factory=LicenceSettings, metadata={"title": "Licences"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        check_range("rows", self.rows, 0, 2**40, "0 (as many as the steps take) or more")
        check_range("temperature", self.temperature, 0.01, 100.0, "between 0.01 and 100")
        check_range("alpha", self.alpha, 0.0, 1.0, "between 0 and 1")
        if self.signal == "cached" and not self.keeps_predictions:
            allowed = "at least 1 with signal cached, 64 say (or teacher_samples)"
            raise SettingsError("teacher_top", self.predictions.teacher_top, allowed)
        if self.features.features and self.signal == "text":
            raise SettingsError(
                "signal", self.signal, "online with features: the teacher runs for its intermediates"
            )
        self._check_kept()
        self._check_rollouts()

    def _check_kept(self) -> None:
        """Raise where predictions are kept that the loss cannot use."""
        for name in ("teacher_top", "teacher_samples"):
            value = getattr(self.predictions, name)
            if value and self.signal in ("online", "text"):
                raise SettingsError(name, value, f"0 with signal {self.signal}")
            if value and self.soft_loss not in ("kl", "hard"):
                allowed = f"0 with objective {self.soft_loss}, which reads all logits"
                raise SettingsError(name, value, allowed)
            if value and self.features.features:
                raise SettingsError(name, value, "0 with features: intermediates are not kept on disk")

    @property
    def keeps_predictions(self) -> bool:
        """Whether the teacher's predictions are kept on disk."""
        return self.predictions.teacher_top > 0 or self.predictions.teacher_samples > 0

    def _check_rollouts(self) -> None:
        """Refuse what makes no sense with text that the student writes."""
        share, name = self.rollouts.on_policy, self.soft_loss
        if name in POLICIES and share not in (None, 1.0):
            raise SettingsError("on_policy", share, f"1 with objective {name}: it learns from drawn tokens")
        if not self.student_share:
            return
        if name == "hard" or self.alpha < 1.0:
            raise SettingsError("alpha", self.alpha, "1 with on_policy: the student's own text is no label")
        if self.signal in ("cached", "text") or self.keeps_predictions:
            raise SettingsError("signal", self.signal, "online with on_policy: its rows are new each time")
        if name in POLICIES and self.rollouts.rollout_temperature not in (None, self.temperature):
            allowed = f"that of the loss, {self.temperature:g}, with objective {name}"
            raise SettingsError("rollout_temperature", self.rollouts.rollout_temperature, allowed)

    @property
    def student_share(self) -> float:
        """Fraction of the batches that the student writes."""
        share = self.rollouts.on_policy
        return float(self.soft_loss in POLICIES) if share is None else share

    @property
    def rollout_temperature(self) -> float:
        """Temperature at which rows are generated."""
        temperature = self.rollouts.rollout_temperature
        return self.temperature if temperature is None else temperature

    @property
    def soft_loss(self) -> str:
        """The objective, ``auto`` resolved: a name of attar.distillation.objectives.OBJECTIVES."""
        return "kl" if self.objective == "auto" else self.objective

    @property
    def learns_softly(self) -> bool:
        """Whether the teacher's predictions are in the loss."""
        return self.alpha > 0.0 and self.soft_loss != "hard" and self.signal != "text"

    @property
    def teacher_signal(self) -> str:
        """The signal, ``auto`` resolved: a name of attar.distillation.signals.SIGNALS."""
        if not self.learns_softly:
            return "online" if self.features.features else "text"
        if self.soft_loss in POLICIES:
            return "policy"
        if self.signal == "auto":
            return "cached" if self.keeps_predictions else "online"
        return self.signal

    @property
    def answers_only(self) -> bool:
        """Whether only the assistant's tokens of a conversation are learned."""
        return self.signal == "text" if self.predict == "auto" else self.predict == "answers"

    @property
    def runs_teacher(self) -> bool:
        """Whether a teacher is of use to the loss."""
        return self.teacher_signal != "text" or bool(self.features.features)


@dataclass(frozen=True, kw_only=True)
class RecoverSettings(LearnSettings):
    """Train a pruned or quantized model to agree with its teacher again, or with ``alpha`` 0 on text without
    a teacher: all weights, or adapters alone."""

    learning_rate: float = _option(2e-4, "peak learning rate; small, because the model is nearly right")
    adapter_rank: int = _adapter_rank()
    adapter_init: str = _option(
        "error",
        "adapters start at the rounding error, teacher - student (LoftQ), or at zero, as they do without a "
        "teacher",
        ("error", "zero"),
    )
    keep_zeros: str = _option(
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
    ``alpha`` 0 and ``share`` 0 it is trained plainly and reported in the same way, for comparison.
    """

    learning_rate: float = _option(1e-3, "peak learning rate")
    adapter_rank: int = _adapter_rank()
    student: StudentSettings = field(default_factory=StudentSettings, metadata={"title": "The student"})
    for_drafting: bool = _option(
        False, "train for speculative decoding: accepted tokens count, half of the rows are the teacher's own"
    )
    head: str = _option(
        "none",
        "a draft head for the model, which stays as it is, in place of a student: "
        + ", ".join(HEAD_SETTINGS),
        tuple(HEAD_SETTINGS),
    )
    head_options: DraftHeadSettings | NoHeadSettings = field(
        default_factory=NoHeadSettings,
        metadata={"variants": HEAD_SETTINGS, "by": "head", "title": "A draft head"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.head)
        _check_adapters(self)
        if self.trains_head:
            self._check_head_alone()

    @property
    def trains_head(self) -> bool:
        """Whether a draft head is trained, and no student."""
        return self.head != "none"

    @property
    def joint_steps(self) -> int:
        """The last steps, in which a model learns together with its draft head."""
        together = getattr(self.head_options, "together", None)
        return 0 if together is None else round(together.joint * self.steps)

    @property
    def makes_model(self) -> bool:
        """Whether the result is a model, and no draft head for one."""
        return not self.trains_head or self.joint_steps > 0

    def _check_head_alone(self) -> None:
        """Raise where an option of students is set."""
        defaults: dict[str, Any] = {"for_drafting": False, "alpha": 1.0}
        defaults |= {"objective": "auto", "signal": "auto", "task": "auto"}
        if self.adapter_rank and not self.joint_steps:
            more = ", or joint above 0: the model learns too" if self.head == "medusa" else ""
            raise SettingsError("adapter_rank", self.adapter_rank, f"left out with head {self.head}{more}")
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise SettingsError(name, getattr(self, name), f"left out with head {self.head}")
        if self.student_share:
            raise SettingsError("on_policy", self.student_share, f"0 with head {self.head}")
        for name in ("teacher_top", "teacher_samples"):
            if value := getattr(self.predictions, name):
                raise SettingsError(name, value, f"0 with head {self.head}: a head needs hidden states")
        for group, name in ((self.student, "student"), (self.features, "features")):
            if group != type(group)():
                raise SettingsError(name, "changed", f"left out with head {self.head}: no student is made")

    @property
    def teacher_share(self) -> float:
        """Fraction of the rows that the teacher generates."""
        share = self.rollouts.share
        default = 1.0 if self.trains_head else 0.5 if self.for_drafting else 0.0
        return default if share is None else share

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
