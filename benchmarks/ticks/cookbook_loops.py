"""The cookbook's side of the benchmark, in the environment of the cookbook: its three loops.

The argument is a plan as JSON; what was measured is printed as JSON. The loops are unmodified, and
train on a stand-in's clients. A rollout is one call and its time on the clock that jumps.
"""
# The cookbook is not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import json
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tinker
from cycles import CyclingService, JumpingLoop, Times, measure
from tinker_cookbook.checkpoint_utils import CheckpointManager
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, StepResult

PROMPT, ANSWER, LOGPROBS = [1, 2], [3, 4], [-1.0, -1.0]
LOOPS = {
    "synchronous": train.do_sync_training,
    "streamed": train.do_sync_training_with_stream_minibatch,
    "async": train.do_async_training,
}


class Answer:
    """Future of a request to the service."""

    def __init__(self, done: asyncio.Future[None], value: object) -> None:
        self._done, self._value = done, value

    async def result_async(self) -> Any:
        await self._done
        return self._value


class Client:
    """Training and sampling client, which samples at once."""

    def __init__(self, service: CyclingService) -> None:
        self._service = service

    async def forward_backward_async(self, data: Sequence[Any], **_: object) -> Answer:
        outputs = [
            {"logprobs": tinker.TensorData(data=[-1.0] * size, dtype="float32", shape=[size])}
            for size in (datum.model_input.length for datum in data)
        ]
        passed = self._service.forward_backward(len(data))
        return Answer(passed, SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    async def optim_step_async(self, _: object) -> Answer:
        return Answer(self._service.optim_step(), SimpleNamespace(metrics={}))

    async def save_state_async(self, name: str, **_: object) -> Answer:
        return Answer(self._service.save(), SimpleNamespace(path=f"tinker://state/{name}"))

    async def save_weights_for_sampler_async(self, name: str, **_: object) -> Answer:
        return Answer(self._service.save(), SimpleNamespace(path=f"tinker://sampler/{name}"))

    async def save_weights_and_get_sampling_client_async(self, *_: object) -> "Client":
        await self._service.save()
        return self

    def create_sampling_client(self, *_: object) -> "Client":
        return self

    async def sample_async(self, **_: object) -> Any:
        sequence = SimpleNamespace(tokens=ANSWER, logprobs=LOGPROBS, stop_reason="stop")
        return SimpleNamespace(sequences=[sequence])


class Rollout(Env):
    """One call, the time that the rollout takes, and a reward by its place in the run."""

    def __init__(self, times: Times, place: tuple[int, int, int]) -> None:
        self._seconds = times.of(*place)
        self._reward = random.Random(f"{times.seed}/{place}").random()

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        return tinker.ModelInput.from_ints(PROMPT), []

    async def step(self, action: object, *, extra: object = None) -> StepResult:
        del action, extra
        await asyncio.sleep(self._seconds)
        return StepResult(
            reward=self._reward,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
        )


class Group(EnvGroupBuilder):
    """Group of rollouts; `played` counts those that were begun."""

    played = 0

    def __init__(self, plan: dict[str, Any], step: int, group: int) -> None:
        places = [(step, group, index) for index in range(plan["group_size"])]
        self._rollouts = [Rollout(Times(**plan["times"]), place) for place in places]

    async def make_envs(self) -> Sequence[Env]:
        Group.played += len(self._rollouts)
        return self._rollouts


class Steps(RLDataset):
    """The groups of each step."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group(self._plan, index, group) for group in range(self._plan["groups"])]

    def __len__(self) -> int:
        return self._plan["steps"]


def configured(plan: dict[str, Any], log_path: str) -> train.Config:
    groups, lag = plan["groups"], plan["lag"]
    nothing: Any = None
    return train.Config(
        learning_rate=0.001,
        dataset_builder=nothing,
        model_name="Qwen/Qwen3-8B",
        recipe_name="cycles",
        max_tokens=2,
        log_path=log_path,
        eval_every=0,
        num_groups_to_log=0,
        rollout_json_export=False,
        async_config=train.AsyncConfig(max_steps_off_policy=lag, groups_per_batch=groups),
        # The async loop would stream as well.
        stream_minibatch_config=train.StreamMinibatchConfig(
            groups_per_batch=groups, num_minibatches=groups
        )
        if plan["loop"] == "streamed"
        else None,
    )


async def train_planned(plan: dict[str, Any], client: Any, log_path: str) -> None:
    nothing: Any = None
    logger: Any = SimpleNamespace(store=None, log_metrics=lambda *_, **__: None)
    tokenizer: Any = SimpleNamespace(decode=str)
    config = configured(plan, log_path)
    await LOOPS[plan["loop"]](
        start_batch=0,
        end_batch=plan["steps"],
        num_batches=plan["steps"],
        config=config,
        training_client=client,
        kl_reference_client=None,
        evaluators=[],
        dataset=Steps(plan),
        ml_logger=logger,
        tokenizer=tokenizer,
        strategy=config.effective_rollout_strategy(),
        checkpoint_mgr=CheckpointManager(client, nothing, log_path, save_every=config.save_every),
    )


def main(plan: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    loop = JumpingLoop()
    service = CyclingService(loop, plan["datums"])
    with tempfile.TemporaryDirectory() as log_path:
        loop.run_until_complete(train_planned(plan, Client(service), log_path))
    seconds = loop.time()
    loop.close()
    print(json.dumps({**measure(service, seconds), "played": Group.played}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
