"""Several models blended into one runner: every step runs through each model on its own pool, with the same
block tables, and the logits are those of the blend.

    logits = ln sum_i w_i softmax(z_i / T)

One engine samples from it and knows nothing of the models. It is what teacher-mixed sampling needs (MiniLLM),
and with one model a temperature that log-probabilities include.

Letters: z_i (W, V) logits of model i; w_i its weight; T temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.runtime.step import Runner, StepInput


class BlendedRunner:
    """A ``Runner`` (see ``step.py``) of several.

    Args:
        runners: with equal blocks; they are stepped together and by nobody else.
        weights: w, of sum 1.
        vocabulary: V; columns behind it have no share in any distribution.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        weights: Sequence[float],
        *,
        vocabulary: int,
        temperature: float = 1.0,
    ) -> None:
        first = runners[0]
        shapes = [(runner.capacity, runner.block_size) for runner in runners]
        assert len(set(shapes)) == 1, f"the runners' pools differ: {shapes}"
        self.runners, self.temperature = tuple(runners), temperature
        self.block_size, self.capacity = first.block_size, first.capacity
        self.vocabulary = min(vocabulary, *(runner.vocabulary for runner in runners))
        contexts = [runner.context for runner in runners if runner.context is not None]
        self.context = min(contexts, default=None)
        self.repeats = all(getattr(runner, "repeats", False) for runner in runners)
        self._log_weights = torch.tensor(weights, dtype=torch.float64).log().tolist()

    def run(self, step: StepInput) -> Tensor:
        """Run a step through every model: logits float32 (W, V)."""
        parts = [
            (runner.run(step)[:, : self.vocabulary] / self.temperature).log_softmax(-1) + weight
            for runner, weight in zip(self.runners, self._log_weights, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        device = parts[0].device
        return torch.stack([part.to(device) for part in parts]).logsumexp(0)

    def fork(self, sequence: int, child: int) -> None:
        """See ``step.py``."""
        for runner in self.runners:
            runner.fork(sequence, child)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``step.py``."""
        for runner in self.runners:
            runner.move(pairs)

    def forget(self, sequence: int) -> None:
        """See ``step.py``."""
        for runner in self.runners:
            runner.forget(sequence)
