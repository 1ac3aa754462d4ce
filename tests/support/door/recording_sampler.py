"""Rollouts through the real path, and what the sampler itself knows of their calls."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
from tinker import ModelInput, SampleResponse, SamplingParams

from ratchet.adapters.calls import POLICY, CallId, Policy, Sampler, Sampling
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import BEGIN, END, PlaySettings
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.recording.journal import read_spans
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.trajectories import trajectories_of
from tests.support.door.door_batches import bearer
from tests.support.door.played_batch import SHARD, service_without_engine, write_examples

RUN_SEED = 11
MOST_CALLS = 200


def seed(rollout_id: str, call: int) -> int:
    """Return the seed with which the policy's `call`-th answer of a rollout is sampled."""
    return CallId(rollout_id, 0, POLICY, call).seed(RUN_SEED)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One call, as the sampler knows it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


Calls = dict[str, dict[int, Sampled]]
"""Rollout → the policy's calls, by their numbers."""


class RecordingSampler:
    """Sampler that keeps what another one was asked and gave, by the seed of the call."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._sampled: dict[int | None, Sampled] = {}

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        response = await self._sampler.sample(prompt, num_samples, sampling_params)
        (sequence,) = response.sequences
        assert sequence.logprobs is not None
        self._sampled[sampling_params.seed] = Sampled(
            prompt.to_ints(),
            [int(token) for token in sequence.tokens],
            [float(logprob) for logprob in sequence.logprobs],
        )
        return response

    def calls(self, rollouts: Sequence[str]) -> Calls:
        """Return all that was sampled, by rollout; no other rollout may have sampled."""
        calls = {
            rollout: {
                call: self._sampled[own]
                for call in range(MOST_CALLS)
                if (own := seed(rollout, call)) in self._sampled
            }
            for rollout in rollouts
        }
        assert sum(map(len, calls.values())) == len(self._sampled)
        return calls


PlayAll = Callable[[Batch, Sequence[str]], None]
"""Plays all rollouts of a batch that has begun; it may block."""


def rollout_names(count: int) -> list[str]:
    """Name the rollouts of `RecordedRollouts`."""
    return [f"{SHARD}-{number:04d}-00" for number in range(count)]


class RecordedRollouts:
    """Rollouts that went through the door, the journal, its Parquet and the assembly.

    As many as `rollouts` are sampled by `sampler`, played by `play`, and rewarded with 1.
    """

    def __init__(
        self, folder: Path, rollouts: int, sampler: Sampler, chat: Chat, play: PlayAll
    ) -> None:
        run, recording = RunFolder(folder), RecordingSampler(sampler)
        shard, sampled = write_examples(run, [{}] * rollouts), ShardBatch(SHARD, 0, group_size=1)
        policy: Any = Policy(recording, "v0")
        sampled_by = SampledBy({POLICY: policy}, Sampling(200, 1.0, 1.0, -1))
        names = rollout_names(rollouts)

        async def play_batch(door: str, name: str, token: str) -> None:
            async with httpx.AsyncClient(headers=bearer(token), timeout=None) as http:
                url = door + BEGIN.format(batch=name)
                begun = (await http.post(url)).raise_for_status().json()
                batch = Batch(door, name, token, begun["attempt"], (POLICY,))
                await asyncio.to_thread(play, batch, names)
                ends = (batch.url(END, rollout) for rollout in names)
                reward = {"outcome": {"reward": 1.0}, "seconds": 0.0}
                ended = await asyncio.gather(*(http.post(end, json=reward) for end in ends))
                assert {response.status_code for response in ended} == {200}

        with Door(chat, {}, RUN_SEED) as door:
            settings = PlaySettings("", [POLICY], concurrency=1, timeout_seconds=0)
            server = RolloutHost(run, door, service_without_engine(), settings)
            parquet = run.spans(sampled.name)
            collect_rollouts.make(parquet, shard, sampled, server, lambda: sampled_by, play_batch)
        self.calls = recording.calls(names)
        self.spans: pa.Table = read_spans(parquet)
        self.trajectories: pa.Table = trajectories_of([parquet])
