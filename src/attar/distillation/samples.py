"""Rows that the teacher writes itself: some tokens of a text, then its own.

A draft model is asked at contexts that its target has written, so that is where it has to agree with it
(DistillSpec, Zhou et al. 2023, arXiv 2310.08461, section 4: data from the target). Rows are drawn in float32,
:data:`ROWS` at a time over one cache of keys and values; each batch has a seed and a file of its own, so that
a killed run goes on behind the last batch and ends with the same rows.

Letters: N rows, S tokens a row, P tokens of text in front, V tokens that may be drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from attar.checkpoint import atomic
from attar.data.packing import PADDING, numbered_generator
from attar.progress import Progress

ROWS = 64  # drawn together


def write_rows(
    teacher: Any,
    prompts: Tensor,
    length: int,
    *,
    vocabulary: int,
    ends: tuple[int, ...],
    temperature: float,
    seed: int,
    work: Path,
    progress: Progress,
) -> Tensor:
    """Let the teacher go on from each prompt: int64 (N, S) on the CPU, each prompt in front of its row.

    Args:
        teacher: a causal language model of transformers in evaluation mode.
        prompts: int64 (N, P), none of it padding; P < S.
        length: S.
        vocabulary: V; rows that only pad the vocabulary are never drawn.
        ends: tokens that end a text; what would stand behind the first one drawn is ``PADDING``.
        temperature: of the draws.
        seed: of the draws.
        work: folder of the finished batches; another run with the same arguments takes them up.
    """
    work.mkdir(parents=True, exist_ok=True)
    batches = prompts.split(ROWS)
    done: list[Tensor] = []
    with progress.task("the teacher writes", total=len(batches)) as task:
        for number, batch in enumerate(batches):
            file = work / f"{number:06d}.safetensors"
            if not file.exists():
                generator = numbered_generator(seed, number)
                rows = _write(teacher, batch, length, vocabulary, ends, temperature, generator)
                atomic.save_tensors(file, {"tokens": rows})
            done.append(load_file(file)["tokens"])
            task.advance()
    return torch.cat(done)


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: the generation config's, else the model's, else the tokenizer's."""
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _write(
    teacher: Any,
    prompts: Tensor,
    length: int,
    vocabulary: int,
    ends: tuple[int, ...],
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """One batch; drawn on the CPU, so that the same logits give the same tokens on every device."""
    rows = torch.full((prompts.shape[0], length), PADDING, dtype=torch.int64)
    rows[:, : prompts.shape[1]] = prompts
    cache = DynamicCache(config=teacher.config)
    over = torch.zeros(prompts.shape[0], dtype=torch.bool)
    final = torch.tensor(ends, dtype=torch.int64)
    unread = prompts
    for place in range(prompts.shape[1], length):
        shown = unread.to(teacher.device)
        z = teacher(input_ids=shown, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        p = (z[:, -1, :vocabulary].float() / temperature).softmax(-1).cpu()
        drawn = torch.multinomial(p, 1, generator=generator)[:, 0]
        rows[~over, place] = drawn[~over]
        over |= torch.isin(drawn, final)
        if bool(over.all()):
            break
        unread = drawn[:, None]
    return rows
