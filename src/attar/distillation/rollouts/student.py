"""Rows that the student writes with its current weights.

A runner is made of the training model for each batch of rows (``runtime/runner/from_model.py``), and with
``mix`` stepped together with a runner of the teacher: teacher-mixed sampling (MiniLLM, arXiv 2306.08543,
section 2.2). No checkpoint is written.

Letters: N rows, S tokens a row, T temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.learner import student_of
from attar.distillation.outputs import run_model
from attar.distillation.rollouts.sampling import ROWS, Rollouts, completions, prompt_lengths, sample_rows
from attar.runtime.runner.blended import BlendedRunner
from attar.runtime.runner.from_model import runner_of
from attar.runtime.step import Runner


@dataclass
class StudentWriter:
    """A student that writes.

    Attributes:
        vocabulary: tokens that may be drawn.
        ends: tokens that end a text.
        temperature: T.
        prompt_tokens: of text, where nothing else says what a prompt is.
        mix: the teacher's weight in the distribution that rows are drawn from.
        teacher: needed with ``mix``.
    """

    vocabulary: int
    ends: tuple[int, ...]
    temperature: float = 1.0
    prompt_tokens: int = 32
    mix: float = 0.0
    teacher: Any = None
    _guide: Runner | None = field(default=None, repr=False)

    def write(self, model: Any, text: Examples, seed: int) -> Rollouts:
        """Continue the prompts of some rows (N, S) of text; the same for the same weights, rows and seed.

        Args:
            model: as the training loop has it; its mode and its random numbers stay as they are.
        """
        student, length = student_of(model), text.tokens.shape[1]
        runner: Runner = runner_of(student, sequences=ROWS, length=length)
        sampled_at = self.temperature
        if self.mix:
            parts, weights = [runner, self._teachers_runner(length)], [1.0 - self.mix, self.mix]
            runner = BlendedRunner(parts, weights, vocabulary=self.vocabulary, temperature=self.temperature)
            sampled_at = 1.0
        lengths = prompt_lengths(text, self.prompt_tokens)
        prompts = [row[:n].tolist() for row, n in zip(text.tokens, lengths.tolist(), strict=True)]
        rows, logprobs = sample_rows(
            runner,
            prompts,
            length,
            vocabulary=self.vocabulary,
            ends=self.ends,
            seed=seed,
            temperature=sampled_at,
        )
        policy = None
        if self.mix:
            policy = row_logprobs(student, completions(rows, lengths), self.temperature, self.vocabulary)
        return Rollouts.of(rows, lengths, logprobs, policy)

    def _teachers_runner(self, length: int) -> Runner:
        """The teacher's runner, made once: its weights do not change."""
        if self._guide is None:
            self._guide = runner_of(self.teacher, sequences=ROWS, length=length)
        return self._guide


@torch.no_grad()  # type: ignore[untyped-decorator]
def row_logprobs(model: Any, examples: Examples, T: float, vocabulary: int) -> Tensor:
    """float32 (N, S): the log-probability of each predicted token, at the token."""
    mode, device = model.training, next(model.parameters()).device
    model.eval()
    values = torch.zeros(examples.tokens.shape)
    for start, batch in enumerate(examples.split(1)):
        z = run_model(model, batch.to(device)).predictions[:, :vocabulary].float() / T
        chosen = z.log_softmax(-1).gather(1, batch.labels[:, None].to(device))[:, 0]
        values[start, 1:][batch.predicted[0, :-1]] = chosen.cpu()
    model.train(mode)
    return values
