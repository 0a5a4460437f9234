"""Distil with TRL's GKD trainer, inside its environment, a step at a time (turns.py).

    python trl_run.py '{"student", "teacher", "tokens", "steps", "batch_size", "precision"}'

Off-policy forward KL (lambda 0, beta 0), AdamW, the rows of ``tokens`` in their order; all else as TRL has
it, gradient checkpointing aside, which is off as in attar.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from turns import Turns


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1])
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    turns = Turns()
    import torch
    from datasets import Dataset
    from safetensors.torch import load_file
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = load_file(job["tokens"])["tokens"]

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([row["input_ids"] for row in batch])
        labels = tokens.clone()
        labels[:, 0] = -100  # predicted from nothing
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    class Trainer(GKDTrainer):
        loss = 0.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.loss = float(loss.detach())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Stepwise(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(trainer.loss)

    with tempfile.TemporaryDirectory() as folder:
        arguments = GKDConfig(
            output_dir=folder,
            lmbda=0.0,
            beta=0.0,
            temperature=1.0,
            max_steps=job["steps"],
            per_device_train_batch_size=job["batch_size"],
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=job["precision"] == "bf16",
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=job["student"],
            teacher_model=job["teacher"],
            args=arguments,
            data_collator=collate,
            train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
            processing_class=AutoTokenizer.from_pretrained(job["student"]),
            callbacks=[Stepwise()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
