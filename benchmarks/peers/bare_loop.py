"""A training loop over the Tinker SDK alone, as people write it by hand: the peer of a run.

The loop has no door, no journal, no Parquet, no Prefect and no resuming. It plays the rollouts of a
plan, whose prompts and seeds `run_speed.py` takes from a recipe, so both sample the same tokens and
train on the same datums.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import tinker

from adapters.project.modules import load_agent_file

hello = load_agent_file("hello")

Plan = dict[str, Any]
Group = dict[str, Any]
Datums = list[tinker.Datum]


async def run(plan: Plan) -> list[dict[str, float]]:
    """Train as planned; return each step's mean reward and when its parts began (Unix time)."""
    service = tinker.ServiceClient()
    trainer = await service.create_lora_training_client_async(**plan["lora"])
    adam = tinker.AdamParams(**plan["adam"])
    tokenizer = None
    report = []
    for step, groups in enumerate(plan["steps"]):
        if step > 0 and step % plan["save_every"] == 0:
            await (await trainer.save_state_async(f"{step:05d}")).result_async()
        saved = await (await trainer.save_weights_for_sampler_async(f"{step:05d}")).result_async()
        times = {"saved": time.time()}
        sampler = await service.create_sampling_client_async(model_path=saved.path)
        tokenizer = tokenizer or sampler.get_tokenizer()
        times["sampling"] = time.time()
        datums, rewards = await _play_step(sampler, groups, plan, tokenizer.decode)
        times["training"] = time.time()
        if datums:
            passed = await trainer.forward_backward_async(datums, plan["loss"])
            stepped = await trainer.optim_step_async(adam)
            await passed.result_async()
            await stepped.result_async()
        report.append({"reward": fmean(rewards), **times})
    await (await trainer.save_state_async("last")).result_async()
    return report


async def _play_step(
    sampler: tinker.SamplingClient, groups: list[Group], plan: Plan, decode: Callable[..., Any]
) -> tuple[Datums, list[float]]:
    """Play all rollouts of a step at once; return the datums of mixed groups, and all rewards."""
    played = await asyncio.gather(*(_play_group(sampler, group, plan) for group in groups))
    datums: Datums = []
    rewards: list[float] = []
    for group, sequences in zip(groups, played, strict=True):
        earned = [
            hello.reward(decode(one.tokens, skip_special_tokens=True), group["identity"])
            for one in sequences
        ]
        rewards += earned
        if min(earned) < max(earned):
            mean, deviation = fmean(earned), stdev(earned)
            datums += [
                _make_datum(group["prompt"], one, (reward - mean) / deviation)
                for one, reward in zip(sequences, earned, strict=True)
                if reward != mean
            ]
    return datums, rewards


async def _play_group(
    sampler: tinker.SamplingClient, group: Group, plan: Plan
) -> Sequence[tinker.SampledSequence]:
    prompt = tinker.ModelInput.from_ints(group["prompt"])

    async def rollout(seed: int) -> tinker.SampledSequence:
        params = tinker.SamplingParams(seed=seed, **plan["sampling"])
        answer: Awaitable[tinker.SampleResponse] = sampler.sample_async(prompt, 1, params)
        return (await answer).sequences[0]

    return await asyncio.gather(*(rollout(seed) for seed in group["seeds"]))


def _make_datum(
    prompt: list[int], sampled: tinker.SampledSequence, advantage: float
) -> tinker.Datum:
    tokens = [*prompt, *sampled.tokens]
    given = len(prompt) - 1
    advantages = [0.0] * given + [advantage] * len(sampled.tokens)
    inputs = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "logprobs": np.array([0.0] * given + list(sampled.logprobs or ()), dtype=np.float32),
        "advantages": np.array(advantages, dtype=np.float32),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()
        },
    )


if __name__ == "__main__":
    planned = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(planned))), encoding="utf-8")
