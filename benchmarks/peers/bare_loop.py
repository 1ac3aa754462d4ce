"""A training loop over the Tinker SDK alone, as people write it by hand: the peer of a run.

The loop has no door, no journal, no Parquet, no Prefect and no resuming. It plays the rollouts of a
plan, whose prompts and seeds `run_speed.py` takes from a recipe, so both sample the same tokens and
train on the same datums. If the plan says `by_client`, the agent itself plays them, by its own
client of OpenAI's API, and an endpoint of a few lines in this process samples what it asks for.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import tinker
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ratchet.adapters.clients.libraries import share_contexts
from ratchet.adapters.project.modules import load_agent_file

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
    endpoint = await _open_endpoint(plan) if plan["by_client"] else None
    report = []
    for step, groups in enumerate(plan["steps"]):
        if step > 0 and step % plan["save_every"] == 0:
            await (await trainer.save_state_async(f"{step:05d}")).result_async()
        saved = await (await trainer.save_weights_for_sampler_async(f"{step:05d}")).result_async()
        times = {"saved": time.time()}
        sampler = await service.create_sampling_client_async(model_path=saved.path)
        tokenizer = tokenizer or sampler.get_tokenizer()
        times["sampling"] = time.time()
        play = partial(_play_group, sampler)
        if endpoint is not None:
            endpoint.sampler, endpoint.decode = sampler, tokenizer.decode
            play = endpoint.play_group
        datums, rewards = await _play_step(play, groups, plan, tokenizer.decode)
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
    play: Callable[[Group, Plan], Awaitable[Sequence[tinker.SampledSequence]]],
    groups: list[Group],
    plan: Plan,
    decode: Callable[..., Any],
) -> tuple[Datums, list[float]]:
    """Play all rollouts of a step at once; return the datums of mixed groups, and all rewards."""
    played = await asyncio.gather(*(play(group, plan) for group in groups))
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


class _Endpoint:
    """An endpoint of OpenAI's API for the rollouts of a plan."""

    sampler: tinker.SamplingClient
    decode: Callable[..., Any]

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked: dict[str, tuple[Group, int]] = {}
        self._sampled: dict[str, tinker.SampledSequence] = {}
        self.url = ""

    async def answer(self, request: Request) -> JSONResponse:
        asked = await request.json()
        (group, seed), name = self._asked[asked["model"]], asked["model"]
        params = tinker.SamplingParams(seed=seed, **self._plan["sampling"])
        prompt = tinker.ModelInput.from_ints(group["prompt"])
        sampled = (await self.sampler.sample_async(prompt, 1, params)).sequences[0]
        self._sampled[name] = sampled
        said = self.decode(sampled.tokens, skip_special_tokens=True)
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": sampled.stop_reason}
        return JSONResponse(
            {
                "id": name,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": name,
                "choices": [choice],
            }
        )

    async def play_group(self, group: Group, plan: Plan) -> Sequence[tinker.SampledSequence]:
        del plan
        names = [f"{group['name']}-{index:02d}" for index in range(len(group["seeds"]))]
        for name, seed in zip(names, group["seeds"], strict=True):
            self._asked[name] = group, seed
        example = {"identity": group["identity"]}
        await asyncio.gather(
            *(hello.play(example, base_url=self.url, api_key="unused", model=n) for n in names)
        )
        return [self._sampled.pop(name) for name in names]


async def _open_endpoint(plan: Plan) -> _Endpoint:
    """Serve an endpoint on this event loop until the program ends."""
    share_contexts()  # as in a run: else a TLS context for each client is most of a step's time
    endpoint = _Endpoint(plan)
    app = Starlette(routes=[Route("/chat/completions", endpoint.answer, methods=["POST"])])
    opened = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    serving = asyncio.create_task(server.serve([opened]))
    while not server.started:
        await asyncio.wait([serving], timeout=0.01)
    endpoint.url = f"http://127.0.0.1:{opened.getsockname()[1]}"
    return endpoint


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
