"""The cookbook's RL loop on a task of ours: run by test_cookbook.py, in the cookbook's environment.

The first argument is the log folder. The server and its key come from the environment.
"""
# The cookbook is not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "local/tiny-chat"
RENDERER = "qwen3_instruct"
ADJECTIVES = ("quiet", "brave", "tiny", "happy", "lazy", "clever", "gentle", "proud")
NOUNS = ("otter", "lion", "fox", "robot", "painter", "sailor", "baker", "pirate")


class Greeting(ProblemEnv):
    """Pays an answer that greets and says who it is: the base model seldom does both."""

    def __init__(self, renderer: renderers.Renderer, identity: str) -> None:
        super().__init__(renderer)
        self.identity = identity

    def get_question(self) -> str:
        return f"You are {self.identity}. Who are you?"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.startswith("Hello") and f"I am {self.identity}." in sample_str

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return f"Hello! I am {self.identity}."


class Greetings(RLDataset):
    """One noun a batch, with every adjective."""

    def __init__(self, renderer: renderers.Renderer, batches: int, group_size: int) -> None:
        self.renderer = renderer
        self.batches = batches
        self.group_size = group_size

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        noun = NOUNS[index % len(NOUNS)]
        return [
            ProblemGroupBuilder(
                env_thunk=partial(Greeting, self.renderer, f"a {adjective} {noun}"),
                num_envs=self.group_size,
            )
            for adjective in ADJECTIVES
        ]

    def __len__(self) -> int:
        return self.batches


@chz.chz
class GreetingsBuilder(RLDatasetBuilder):
    batches: int
    group_size: int

    async def __call__(self) -> tuple[RLDataset, None]:
        renderer = renderers.get_renderer(RENDERER, tokenizer=get_tokenizer(MODEL))
        return Greetings(renderer, self.batches, self.group_size), None


def configured(log_path: str) -> train.Config:
    return train.Config(
        model_name=MODEL,
        renderer_name=RENDERER,
        recipe_name="greeting",
        dataset_builder=GreetingsBuilder(batches=12, group_size=16),
        loss_fn="importance_sampling",
        learning_rate=5e-3,
        lora_rank=16,
        max_tokens=24,
        log_path=log_path,
        eval_every=0,
        save_every=0,
    )


if __name__ == "__main__":
    asyncio.run(train.main(configured(sys.argv[1])))
