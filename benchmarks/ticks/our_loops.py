"""Ratchet's side of the benchmark: its own loop over a service that works in cycles.

Real are the run's folder and ledgers, the shards, the order and the queue of steps, streaming, what
samples a batch, each step's files from sealed spans to datums, and the owner of the weights. Stand-
ins are the service's client, the threads in which batches are played, and the rollouts: each waits
its time on the clock that jumps, and is recorded as one call of four tokens. Prefect is left out.
While this program computes the clock stands still.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from prefect.logging import disable_run_logger
from prefect.states import Completed
from tinker import Datum, TensorData
from tinker.types import (
    ForwardBackwardOutput,
    OptimStepResponse,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

from adapters.calls import POLICY
from adapters.door.batches import SampledBy
from adapters.player_protocol import RolloutEnd
from adapters.rewards import Reward
from adapters.tinker.engines import TinkerServer
from adapters.tinker.service import Service
from benchmarks.ticks.cycles import CyclingService, JumpingLoop, Times, measure
from flows.recipe.loading import read_lineage
from flows.recipe.recipe import Recipe
from flows.runtime.evaluation import HeldOutEvaluations
from flows.runtime.extras import Extras
from flows.runtime.open_rollouts import RolloutRunner
from flows.runtime.open_run import OpenRun
from flows.runtime.overlap import draw_train_shard, play_steps
from flows.runtime.policies import open_policies
from flows.train import learn
from tasks.recording.journal import Journal, seal
from tasks.recording.spans import LLM, Span, end_spans
from tasks.rollouts import check_step
from tasks.settings.rollouts import Rollouts
from tasks.spending.so_far import SpentSoFar
from tasks.storage.batch_plans import BatchPlan
from tasks.storage.durability import DurableTask
from tasks.storage.files import write_rows
from tasks.storage.manifest import bind_run
from tasks.storage.names import parse_rollout
from tasks.tracking.run_tracking import RunTracking

LOGPROB = -1.0
"""Log-probability of each token; the weights of the stand-in never change."""


class ClockedFuture(Future[Any]):
    """Future of what happens on the loop; `wait_on_clock` lets the clock run until then."""

    def __init__(self, happening: asyncio.Future[Any], value: object = None) -> None:
        super().__init__()
        self.happening = happening
        happening.add_done_callback(lambda _: self.set_result(value))


def wait_on_clock(
    loop: JumpingLoop, futures: Sequence[Future[Any]], timeout: float | None, return_when: str
) -> Any:
    """Wait as `concurrent.futures.wait` does; the clock runs if a future is clocked."""
    clocked = [one.happening for one in futures if isinstance(one, ClockedFuture)]

    async def first() -> None:
        await asyncio.wait(clocked, return_when=asyncio.FIRST_COMPLETED)

    if clocked and not any(future.done() for future in futures):
        loop.run_until_complete(first())
    return wait(futures, 0 if clocked else timeout, return_when)


class Answer:
    """Future of a request to the service."""

    def __init__(self, done: asyncio.Future[None], value: object) -> None:
        self._future = ClockedFuture(done, value)

    def future(self) -> Future[Any]:
        return self._future


class TrainingClient:
    """Part of `tinker.TrainingClient` that trains and saves."""

    def __init__(self, service: CyclingService) -> None:
        self._service = service
        self.holder = SimpleNamespace(run_coroutine_threadsafe=_run_at_once)

    def forward_backward(self, data: Sequence[Datum], *_: object) -> Answer:
        targets = [datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in data]
        outputs = [{"logprobs": TensorData.from_numpy(one * 0.0 + LOGPROB)} for one in targets]
        made = ForwardBackwardOutput("scalar", outputs, {})
        return Answer(self._service.forward_backward(len(data)), made)

    def optim_step(self, _: object) -> Answer:
        return Answer(self._service.optim_step(), OptimStepResponse(metrics=None))

    def save_weights_for_sampler(self, name: str, **_: object) -> Answer:
        saved = SaveWeightsForSamplerResponse(path=f"tinker://stand-in/sampler_weights/{name}")
        return Answer(self._service.save(), saved)

    def save_state(self, name: str, **_: object) -> Answer:
        saved = SaveWeightsResponse(path=f"tinker://stand-in/weights/{name}")
        return Answer(self._service.save(), saved)


class ServiceClient:
    """Part of `tinker.ServiceClient` that creates clients."""

    def __init__(self, training: TrainingClient) -> None:
        self._training = training

    def create_lora_training_client(self, **_: object) -> "Made":
        return Made(self._training)

    def create_sampling_client(self, **_: object) -> "Made":
        return Made(SimpleNamespace(sample=score))


def _run_at_once(work: Coroutine[Any, Any, None]) -> "Made":
    """Leave out work for the SDK's thread, which is none here."""
    work.close()
    return Made(None)


class Made:
    """Future of what is there at once."""

    def __init__(self, value: object) -> None:
        self._value = value

    def result(self) -> object:
        return self._value

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._value)
        return future


def score(*_: object, prompt_logprobs_last_n: int, **__: object) -> Made:
    """Return the log-probabilities of the last tokens of a prompt."""
    scored = np.full(prompt_logprobs_last_n, LOGPROB, np.float32)
    return Made(SampleResponse(sequences=[], prompt_logprobs_np=scored))


class PlayedBatch:
    """Future of a batch's sealed spans; whoever waits for it lets the clock run."""

    def __init__(self, loop: JumpingLoop, playing: asyncio.Task[Path]) -> None:
        self._loop, self._playing = loop, playing
        self.wrapped_future = ClockedFuture(playing)
        self.state = Completed()

    def wait(self) -> None:
        self._loop.run_until_complete(self._playing)

    def result(self) -> Path:
        return self._playing.result()

    def add_done_callback(self, call: Callable[["PlayedBatch"], None]) -> None:
        self._playing.add_done_callback(lambda _: call(self))


class Places:
    """Places in which batches are played, as many at a time as a flow has threads for them."""

    def __init__(self, loop: JumpingLoop, rollouts: Rollouts, times: Times) -> None:
        self._loop, self._times = loop, times
        self._places = asyncio.Semaphore(rollouts.batches * rollouts.steps_under_way())
        self._at_once = rollouts.concurrency_of_batch()

    def submit(self, _: object, parameters: Mapping[str, Any]) -> PlayedBatch:
        return PlayedBatch(self._loop, self._loop.create_task(self._collect(**parameters)))

    async def _collect(
        self,
        path: Path,
        shard: Path,
        plan: BatchPlan,
        host: Any,
        sampled_by: Callable[[], SampledBy],
        play: object,
    ) -> Path:
        del play
        async with self._places:
            version = sampled_by().policies[POLICY].version
            running = asyncio.Semaphore(self._at_once)
            examples = plan.examples(shard)
            played = (self._play(rollout, running) for rollout, _ in examples)
            seconds = await asyncio.gather(*played)
            with Journal(host.run.journal(plan.name)) as journal:
                for (rollout, row), took in zip(examples, seconds, strict=True):
                    for span in made_up_spans(rollout, dict(row), version, took):
                        journal.append_soon({"run_id": host.run.name, **span})
        return seal(journal.path, path)

    async def _play(self, rollout: str, running: asyncio.Semaphore) -> float:
        named = parse_rollout(rollout)
        group, index = map(int, rollout.split("-")[-2:])
        seconds = self._times.of(named.step, group, index)
        async with running:
            await asyncio.sleep(seconds)
        return seconds


def made_up_spans(rollout: str, row: Mapping[str, Any], version: str, seconds: float) -> list[Span]:
    """Make the spans of a rollout of one call; the reward is drawn by the rollout's name."""
    named, now = parse_rollout(rollout), datetime.now(UTC)
    called = {
        "shard": named.shard,
        "step": named.step,
        "group_id": named.group,
        "rollout_id": rollout,
        "attempt": 0,
        "role": POLICY,
        "call": 0,
        "span_id": f"{rollout}.0.{POLICY}.0",
        "kind": LLM,
        "started": now,
        "ended": now,
        "policy_version": version,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4],
        "logprobs": [LOGPROB, LOGPROB],
        "kept_tokens": 0,
    }
    reward = Reward(random.Random(rollout).random())
    ends = end_spans(RolloutEnd(reward, seconds, rollout, 0, {POLICY: [0]}), now)
    ends[-1]["attributes"] = {name: row[name] for name in ("example_id", "example")}
    return [called, *ends]


class ClockedEvent:
    """Event as of `threading`; whoever waits for it lets the clock run."""

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop = loop
        self.clear()

    def clear(self) -> None:
        self._set = self._loop.create_future()

    def set(self) -> None:
        if not self._set.done():
            self._set.set_result(None)

    def wait(self) -> None:
        self._loop.run_until_complete(self._set)


def train(folder: Path, settings: Mapping[str, Any], datums: int, times: Times) -> dict[str, Any]:
    """Train a run whose rollouts have the `settings`; a cycle carries `datums` of them."""
    recipe = make_recipe(folder, settings, times.seed)
    loop = JumpingLoop()
    service = CyclingService(loop, datums)
    with (
        patch.object(DurableTask, "__call__", DurableTask.make),
        patch("flows.runtime.overlap.Event", partial(ClockedEvent, loop)),
        patch("adapters.tinker.service.wait", partial(wait_on_clock, loop)),
        disable_run_logger(),
        opened(folder, recipe, ServiceClient(TrainingClient(service))) as run,
    ):
        places: Any = Places(loop, recipe.rollouts, times)
        host: Any = SimpleNamespace(run=run.folder)
        check = partial(check_step, most_failed=recipe.rollouts.most_failed)
        none: Any = None
        runner = RolloutRunner(host, places, none, run.policies.at, check)
        steps = play_steps(run, recipe, runner, partial(draw_train_shard, recipe, run.folder))
        learn(
            run, recipe, steps, HeldOutEvaluations(recipe, run, none), Extras(run, recipe, none, {})
        )
        measured = measure(service, loop.time())
    loop.close()
    return measured


def make_recipe(folder: Path, settings: Mapping[str, Any], seed: int) -> Recipe:
    folder.mkdir(parents=True)
    examples = folder / "examples.jsonl"
    write_rows(examples, [{"number": number} for number in range(64)])
    return Recipe.model_validate(
        {
            "agent": "hello",
            "dataset": {"path": str(examples), "held_out": 0},
            "optimizer": {"learning_rate": 0.001},
            "seed": seed,
            **settings,
        }
    )


@contextmanager
def opened(folder: Path, recipe: Recipe, client: ServiceClient) -> Iterator[OpenRun]:
    """Open a new run in a folder, as a flow does, on the stand-in's client."""
    service = Service(cast(Any, client), TinkerServer(None, None, Future(), None))
    values = recipe.model_dump(mode="json")
    with (
        patch.dict("os.environ", {"RATCHET_RUNS": str(folder)}),
        bind_run("run", values, recipe.fingerprint()) as run,
        RunTracking(run, {}, recipe.steps, recipe.lag) as tracking,
    ):
        policies = open_policies(recipe, read_lineage(run, recipe), run, service, on_policy=False)
        yield OpenRun(
            folder=run,
            service=service,
            policies=policies,
            tracking=tracking,
            steps=recipe.steps,
            on_policy=True,
            unusable=Event(),
            spending=SpentSoFar(run),
            budget=recipe.budget,
            retention=None,
        )
