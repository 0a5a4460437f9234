"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.options import check_at_least, check_choices, setting

VERSION = 3

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNNERS = ("auto", "compiled", "device", "modules", "transformers", "blocks")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """What to measure, on which text, and how precisely."""

    data: str = data_field()
    bos: str = bos_field()
    tokens: int = setting(16384, "held-out tokens to evaluate on")
    sequence_length: int = setting(
        512, "tokens in a sequence, at most the context; the first is not predicted"
    )
    batch_size: int = setting(8, "sequences in one pass (fewer when their logits are large)")
    noise_floor: bool = setting(True, "run 8 rows of a float32 reference again with products in bfloat16")
    speed: bool = setting(True, "measure prefill and decode tokens/s")
    prompt_tokens: int = setting(128, "prompt of the speed measurement")
    decode_tokens: int = setting(32, "tokens decoded in a round of the speed measurement")
    sample: str = setting(
        "auto",
        "prompt of the greedy sample; auto: code, a story, or a question in the model's chat "
        "template, as fits the model; empty: no sample",
    )
    sample_tokens: int = setting(48, "length of the greedy sample, and of compared answers at most")
    answers: int = setting(
        8, "prompts that fit the model, 8 at most, whose greedy answers are compared; 0: none"
    )
    tasks: tuple[str, ...] = setting(
        (),
        "multiple-choice questions, JSON lines with q, choices, label; recall: a word that was "
        "given somewhere in a full context (4,096 tokens at most; recall:2048)",
    )
    tasks_limit: int = setting(0, "questions of each task, the first ones; 0: all")
    runner: str = setting(
        "auto",
        "what computes: auto is what generate and serve run; transformers is exact arithmetic on "
        "decoded weights, and blocks the same with one block in memory at a time, without sample and "
        "speed, which auto chooses for a model larger than memory",
        choices=RUNNERS,
    )
    kv_dtype: str = setting("auto", "how the runner keeps keys and values, as in generate and serve")
    activations: int | str = setting(
        "auto",
        "bits of what products of packed weights take, as in generate and serve",
        choices=("auto", 16, 8),
    )
    reference_speed: bool = setting(False, "time transformers on the decoded weights as well")
    seed: int = setting(0, "seed of the choice of text")
    device: str = setting("cpu", "cpu, cuda or cuda:0")
    dtype: str = setting(
        "auto",
        "what to compute in; auto: as generate and serve do; in transformers and for the "
        "reference float32 on a CPU, the checkpoint's own on a GPU",
        choices=DTYPES,
    )

    def __post_init__(self) -> None:
        check_text(self)
        check_choices(self)
        check_at_least(self, tokens=2, sequence_length=2, batch_size=1, prompt_tokens=1, decode_tokens=1)
        check_at_least(self, sample_tokens=1, tasks_limit=0, answers=0)
        if self.answers > 8:
            raise SettingsError("answers", self.answers, "0 to 8")
        for name in ("kv_dtype", "activations"):
            if self.runner in ("transformers", "blocks") and getattr(self, name) != "auto":
                raise SettingsError(name, getattr(self, name), f"auto with --runner {self.runner}")


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """On which text a finished model is measured, and how far from the original it may be."""

    data: str = data_field()
    bos: str = bos_field()
    tokens: int = setting(4096, "held-out tokens to measure on")
    max_kl: float = setting(0.5, "mean KL to the original, nats, above which a model is not fit")
    seed: int = setting(0, "seed of the choice of text")
    device: str = setting("cpu", "cpu, cuda or cuda:0")

    def __post_init__(self) -> None:
        check_text(self)
        check_at_least(self, tokens=2)
        if not self.max_kl > 0:
            raise SettingsError("max_kl", self.max_kl, "above 0")
