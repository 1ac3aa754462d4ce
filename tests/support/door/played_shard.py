"""A shard in several batches, played by any player over a sampler that counts what it is asked."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
from tinker import ModelInput, SampleResponse, SamplingParams

from ratchet.adapters.calls import POLICY, Policy, Sampling
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.rollouts import Play, RolloutHost, collect_rollouts
from ratchet.tasks.storage.files import write_rows
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.door.played_batch import SHARD, ends, service_without_engine
from tests.support.door.stand_in import CHAT, StandIn, turn

AGENT = "tests.support.agents.dask_agents:talks"
EXAMPLES: list[dict[str, Any]] = [{"number": number} for number in range(8)]
SLOW = [example | {"calls": 4, "thinks": 0.5} for example in EXAMPLES]

ANSWER_SECONDS = 0.05
UNEQUAL = ("started", "ended")
"""Columns that hold clocks."""


class CountingSampler(StandIn):
    """Sampler that counts its answers by the seed of the call, and takes its time for each."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        super().__init__(lambda chosen, _params, _prompt: turn(chosen))
        self.answered: Counter[int | None] = Counter()
        self._seconds = seconds

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        await asyncio.sleep(self._seconds)
        self.answered[sampling_params.seed] += 1
        return await super().sample(prompt, num_samples, sampling_params)


class PlayedShard:
    """A shard of rollouts of a test's own agent in a run's folder, and its door."""

    def __init__(
        self,
        folder: Path,
        agent: str,
        examples: Sequence[dict[str, Any]],
        batches: int,
        listener: Listener | None = None,
    ) -> None:
        self.run = RunFolder(folder)
        self.sampler = CountingSampler()
        self._batches = [ShardBatch(SHARD, number, group_size=2) for number in range(batches)]
        rows = [
            {"example_id": n, "example": example, "batch": n * batches // len(examples)}
            for n, example in enumerate(examples)
        ]
        self.path = self.run.shard(SHARD)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(self.path, rows)
        self._settings = PlaySettings(agent, [POLICY], concurrency=8, timeout_seconds=60.0)
        self._exit = ExitStack()
        self.door = Door(CHAT, {}, run_seed=0, listener=listener or Listener())

    def __enter__(self) -> "PlayedShard":
        self._exit.enter_context(self.door)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def server(self) -> RolloutHost:
        """The run's side of the rollouts, behind which there is no engine."""
        return RolloutHost(self.run, self.door, service_without_engine(), self._settings)

    def play(self, play: Play) -> list[Span]:
        """Play all batches side by side; return the spans of their journals."""
        server = self.server

        def play_batch(batch: ShardBatch) -> None:
            path = self.run.spans(batch.name)
            collect_rollouts.make(path, self.path, batch, server, self.sampled_by, play)

        with ThreadPoolExecutor(len(self._batches)) as threads:
            for played in [threads.submit(play_batch, batch) for batch in self._batches]:
                played.result()
        return self.spans()

    def spans(self) -> list[Span]:
        """Return the spans that are recorded up to now."""
        journals = [self.run.journal(batch.name) for batch in self._batches]
        return [span for path in journals if path.exists() for span in read_journal(path)]

    def ends(self) -> list[Span]:
        """Return the ends that are recorded up to now, by rollout and attempt."""
        return ends(self.spans())

    def sampled_by(self) -> SampledBy:
        """Return the sampler as the policy."""
        policy = cast(Any, Policy(cast(Any, self.sampler), "v0"))
        return SampledBy({POLICY: policy}, Sampling(16, 1.0, 1.0, -1))


def _uncached(value: Any) -> Any:
    """Return a span's value without the count of cached tokens, if it is the attributes."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name != "cached_tokens"}


def comparable(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return spans in an order of their own, without clocks and what a cache happened to hold."""
    kept = [
        {
            name: np.array(value).tolist() if isinstance(value, list) else _uncached(value)
            for name, value in span.items()
            if name not in UNEQUAL
        }
        for span in spans
    ]
    return sorted(kept, key=lambda span: span["span_id"])
