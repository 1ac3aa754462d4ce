"""The cookbook's side of `benchmarks.beside_cookbook.texts`, in the environment of the cookbook.

The arguments are a plan and the log folder. The plan's `method` is texts, which `supervised.train`
trains, or pairs of them, which `train_dpo` does. The server and its key come from the environment.
Each batch that the cookbook draws is a line of `drawn.jsonl` beside the log. The program ends
before it trains if the cookbook's renderer makes other tokens, or trains others, than the plan has.
"""
# The cookbook is not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

Plan = dict[str, Any]


class Steps(SupervisedDataset):
    """The texts of each step, in the order of the plan, as the cookbook makes datums of them."""

    def __init__(self, plan: Plan) -> None:
        renderer = get_renderer(
            plan["renderer"], tokenizer=get_tokenizer(plan["config"]["model_name"])
        )
        self.drawn = Path(plan["drawn"])
        self.steps = [[made(text, renderer) for text in step] for step in plan["steps"]]

    def get_batch(self, index: int) -> list[tinker.Datum]:
        with self.drawn.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time()}) + "\n")
        return self.steps[index]

    def set_epoch(self, seed: int = 0) -> None:
        del seed  # the plan has the order

    def __len__(self) -> int:
        return len(self.steps)


@chz.chz
class StepsBuilder(SupervisedDatasetBuilder):
    plan: str

    def __call__(self) -> tuple[SupervisedDataset, None]:
        return Steps(read_plan(self.plan)), None


def made(text: dict[str, Any], renderer: Renderer) -> tinker.Datum:
    """Make a datum of a conversation, and check that its tokens are those of the plan."""
    datum = conversation_to_datum(text["messages"], renderer, None, reduction="none")
    inputs = {name: given.to_numpy().tolist() for name, given in datum.loss_fn_inputs.items()}
    own = (datum.model_input.to_ints(), inputs["target_tokens"], inputs["weights"])
    if own != (planned := (text["tokens"], text["targets"], text["weights"])):
        raise SystemExit(f"the cookbook trains {own}, `ratchet train` {planned}")
    return datum


def read_plan(path: str) -> Plan:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def main(path: str, log_path: str) -> None:
    """Train by the cookbook's own program of the plan's method."""
    plan = read_plan(path)
    settings: dict[str, Any] = {
        **plan["config"],
        "recipe_name": plan["method"],
        "dataset_builder": StepsBuilder(plan=path),
        "lr_schedule": "constant",
        "log_path": log_path,
        "eval_every": 0,
        "infrequent_eval_every": 0,
        "ttl_seconds": None,
    }
    if plan["method"] == "pairs":
        train_dpo.main(train_dpo.Config(**settings))
    else:
        asyncio.run(train.main(train.Config(**settings)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
