"""The cookbook's side of `benchmarks.beside_cookbook.rollouts`, in the environment of the cookbook.

The arguments are a plan and the log folder. The server and its key come from the environment. The
program ends before it samples if the plan has other prompts than the model's own chat template.
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

Plan = dict[str, Any]


class Task:
    """The planned task: how an example is asked and an answer is paid."""

    def __init__(self, plan: Plan) -> None:
        agent = Path(plan["agent"])
        sys.path.insert(0, str(agent.parent))
        self.agent = importlib.import_module(agent.stem)
        self.stop = plan["stop"]
        self.tokenizer = get_tokenizer(plan["config"]["model_name"])

    def ask(self, example: dict[str, Any]) -> list[int]:
        messages = [{"role": "user", "content": self.agent.question(example["text"])}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def pay(self, answer: list[int], example: dict[str, Any]) -> float:
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return self.agent.reward(text, {key: example[key] for key in ("name", "age", "city")})


class Extraction(Env):
    """One question about one example, answered in one call."""

    def __init__(self, task: Task, example: dict[str, Any]) -> None:
        self.task, self.example = task, example

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        return tinker.ModelInput.from_ints(self.task.ask(self.example)), self.task.stop

    async def step(self, action: list[int], *, extra: object = None) -> StepResult:
        del extra
        return StepResult(
            reward=self.task.pay(action, self.example),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
        )


class Group(EnvGroupBuilder):
    def __init__(self, task: Task, example: dict[str, Any], size: int) -> None:
        self.made = [Extraction(task, example) for _ in range(size)]

    async def make_envs(self) -> Sequence[Env]:
        return self.made


class Steps(RLDataset):
    """The examples of each step, in the order of the plan."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self.task, self.plan = task, plan

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        size, groups = self.plan["group_size"], self.plan["steps"][index]
        return [Group(self.task, group["example"], size) for group in groups]

    def __len__(self) -> int:
        return len(self.plan["steps"])


@chz.chz
class StepsBuilder(RLDatasetBuilder):
    plan: str

    async def __call__(self) -> tuple[RLDataset, None]:
        plan = read_plan(self.plan)
        task = Task(plan)
        check_prompts(task, plan)
        return Steps(task, plan), None


def check_prompts(task: Task, plan: Plan) -> None:
    """Check that each example is asked by the tokens that the plan has."""
    for group in (group for step in plan["steps"] for group in step):
        if (asked := task.ask(group["example"])) != group["prompt"]:
            raise SystemExit(
                f"the cookbook asks by the tokens {asked}, `ratchet train` by {group['prompt']}; "
                "give a base model whose renderer writes its own template"
            )


def read_plan(path: str) -> Plan:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def configured(plan: str, log_path: str) -> train.Config:
    planned = read_plan(plan)
    lag, groups = planned["lag"], len(planned["steps"][0])
    ahead = train.AsyncConfig(max_steps_off_policy=lag, groups_per_batch=groups)
    return train.Config(
        **planned["config"],
        recipe_name="people",
        dataset_builder=StepsBuilder(plan=plan),
        async_config=ahead if lag else None,
        # `ratchet train` trains no rollout without an advantage.
        remove_constant_reward_groups=not lag,
        log_path=log_path,
        eval_every=0,
        ttl_seconds=None,
    )


if __name__ == "__main__":
    asyncio.run(train.main(configured(*sys.argv[1:3])))
