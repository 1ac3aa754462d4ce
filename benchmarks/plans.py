"""The plan of the bare loop: prompts and seeds of all steps of a recipe of the agent hello."""

from typing import Any

from transformers import AutoTokenizer

from adapters.calls import POLICY, Place
from adapters.chat import Chat
from agents.hello import question
from engine.model.base_models import find
from flows.recipe import Recipe
from flows.runtime.open_run import sampled, train_split
from tasks.shards import choose


def planned(recipe: Recipe) -> dict[str, Any]:
    """Return the plan of the bare loop: the recipe's prompts, seeds and settings."""
    tokenizer = AutoTokenizer.from_pretrained(find(recipe.model.base).folder)
    chat = Chat(tokenizer, recipe.model.renderer)
    sampling, examples = sampled(recipe), train_split(recipe).examples()
    shards = [
        choose(examples, recipe.seed, step, recipe.rollouts.groups) for step in range(recipe.steps)
    ]
    return {
        "lora": {
            "base_model": recipe.model.base,
            "rank": recipe.model.lora_rank,
            "seed": recipe.seed,
        },
        "adam": recipe.optimizer.model_dump(),
        "loss": recipe.algorithm.loss,
        "save_every": recipe.checkpoints.every,
        "sampling": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": chat.stop_tokens,
        },
        "steps": [
            [
                group(chat, row["example"]["identity"], f"train-{step:05d}-{place:04d}", recipe)
                for place, row in enumerate(shard)
            ]
            for step, shard in enumerate(shards)
        ],
    }


def group(chat: Chat, identity: str, name: str, recipe: Recipe) -> dict[str, Any]:
    """Return a prompt, and the seed of each rollout as the door derives it."""
    places = (
        Place(f"{name}-{index:02d}", 0, POLICY, 0) for index in range(recipe.rollouts.group_size)
    )
    return {
        "identity": identity,
        "prompt": chat.render([{"role": "user", "content": question(identity)}], []),
        "seeds": [place.seed(recipe.seed) for place in places],
    }
