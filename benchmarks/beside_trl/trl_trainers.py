"""TRL's side of `benchmarks.beside_trl.trainings`, in the environment of trl.

The arguments are a plan and the folder of the trained adapter. The plan's `method` is texts, dpo or
kto, which SFTTrainer, DPOTrainer and KTOTrainer train. The last line of stdout is the loss of each
step.
"""
# TRL is not installed where the types are checked, and `datasets` is a folder of ours there.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from datasets import Dataset

TRAINERS = {
    "texts": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
}


def record(trainer: type, prepares: bool) -> type:
    """Return a trainer that keeps its losses, and that trains the plan's tokens as they are.

    SFTTrainer leaves a data set with tokens as it is. The other two make tokens of any.
    """

    class Recorded(trainer):
        """A trainer of TRL's, which is otherwise unmodified."""

        losses: list[float]

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            self.losses.append(loss.item())
            return loss

        def _prepare_dataset(self, dataset: Dataset, *given: Any, **named: Any) -> Dataset:
            return super()._prepare_dataset(dataset, *given, **named) if prepares else dataset

    Recorded.losses = []
    return Recorded


def main(path: str, out: str) -> None:
    """Train by TRL's own trainer of the plan's method."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = [row for step in plan["steps"] for row in step]
    trainer, config = TRAINERS[plan["method"]]
    base = AutoModelForCausalLM.from_pretrained(plan["base"], dtype=torch.float32)
    arguments = config(
        output_dir=out,
        per_device_train_batch_size=len(plan["steps"][0]),
        max_steps=len(plan["steps"]),
        max_length=None,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **plan["optimizer"],
    )
    trained = record(trainer, prepares=plan["method"] == "texts")(
        model=PeftModel.from_pretrained(base, plan["start"], is_trainable=True),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(plan["base"]),
    )
    trained.train()
    trained.model.save_pretrained(out, selected_adapters=["default"])
    print(json.dumps(trained.losses))


if __name__ == "__main__":
    main(*sys.argv[1:3])
