"""The example `people` by the Tinker cookbook's own RL loop, in the cookbook's environment.

The arguments are a plan, the agent's file and the log folder. The server and its key come from the
environment. The prompts are those of the model's own chat template, as Ratchet writes them.
"""
# The cookbook is not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer


class Extraction(Env):
    """One question about one example, answered in one call."""

    def __init__(self, agent: Any, tokenizer: Any, example: dict[str, Any]) -> None:
        self.agent = agent
        self.tokenizer = tokenizer
        self.wanted = {key: example[key] for key in ("name", "age", "city")}
        self.question = agent.question(example["text"])

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        messages = [{"role": "user", "content": self.question}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return tinker.ModelInput.from_ints(tokens), [self.tokenizer.eos_token_id]

    async def step(self, action: list[int], *, extra: object = None) -> StepResult:
        del extra
        answer = self.tokenizer.decode(action, skip_special_tokens=True)
        return StepResult(
            reward=self.agent.reward(answer, self.wanted),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
        )


class Group(EnvGroupBuilder):
    def __init__(self, agent: Any, tokenizer: Any, example: dict[str, Any], size: int) -> None:
        self.made = [Extraction(agent, tokenizer, example) for _ in range(size)]

    async def make_envs(self) -> Sequence[Env]:
        return self.made


class Steps(RLDataset):
    """The examples of each step, in the order of the plan."""

    def __init__(self, agent: Any, plan: dict[str, Any]) -> None:
        self.agent, self.plan = agent, plan
        self.tokenizer = get_tokenizer(plan["base"])

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        size = self.plan["group_size"]
        examples = self.plan["steps"][index]
        return [Group(self.agent, self.tokenizer, example, size) for example in examples]

    def __len__(self) -> int:
        return len(self.plan["steps"])


@chz.chz
class StepsBuilder(RLDatasetBuilder):
    agent: str
    plan: str

    async def __call__(self) -> tuple[RLDataset, None]:
        sys.path.insert(0, str(Path(self.agent).parent))
        agent = importlib.import_module(Path(self.agent).stem)
        return Steps(agent, json.loads(Path(self.plan).read_text())), None


def configured(plan: str, agent: str, log_path: str) -> train.Config:
    planned = json.loads(Path(plan).read_text())
    return train.Config(
        model_name=planned["base"],
        recipe_name="people",
        dataset_builder=StepsBuilder(agent=agent, plan=plan),
        loss_fn="importance_sampling",
        learning_rate=planned["learning_rate"],
        lora_rank=planned["lora_rank"],
        max_tokens=planned["max_tokens"],
        log_path=log_path,
        eval_every=0,
        save_every=0,
    )


if __name__ == "__main__":
    asyncio.run(train.main(configured(*sys.argv[1:4])))
