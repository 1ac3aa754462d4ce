"""shard → rollouts: the agent, group_size times an example. A failed one is a row, not a crash."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from adapters.agents import Endpoint, Example, Play, contained_task
from adapters.calls import POLICY, Begun, Completion, Policy, Sampler, Sampling
from adapters.chat import Chat
from adapters.door import Door
from adapters.tinker import Service
from tasks.checkpoints import Checkpoint
from tasks.journal import Journal, read_journal
from tasks.recorded import recorded_calls
from tasks.shards import Example as Row
from tasks.spans import ERROR, REWARD, Span, begun_span, call_span, error_span, reward_span

WHOLE = Sampling(max_tokens=1, temperature=1.0, top_p=1.0, top_k=-1)
"""What the door samples before a batch says how."""

HOLD_SECONDS = 0.2
"""How often it is looked whether the disk is full."""


@dataclass(frozen=True)
class Rollout:
    """One attempt of the agent at one example."""

    id: str
    group: str
    attempt: int
    example_id: int
    example: Example
    failures: int = 0
    """How many earlier attempts ended with an error; one that was only cut off is none."""
    recorded: Sequence[Completion] = ()
    """The calls that earlier attempts have answered; a rollout that has failed begins anew."""


def plan(
    batch: str, shard: Sequence[Row], group_size: int, journal: Path, tries: int = 1
) -> list[Rollout]:
    """The rollouts of a batch that its journal does not show as ended, each as a new attempt.

    A rollout ends with its reward, or with its error when it has failed `tries` times.
    """
    spans = read_journal(journal) if journal.exists() else []
    rewarded, failures, attempts = _recorded(spans)
    recorded = recorded_calls(spans)
    planned = []
    for place, row in enumerate(shard):
        group = f"{batch}-{place:04d}"
        for index in range(group_size):
            rollout = f"{group}-{index:02d}"
            failed = failures[rollout]
            if rollout not in rewarded and failed < tries:
                attempt = attempts.get(rollout, -1) + 1
                example = row["example_id"], row["example"]
                calls = recorded.get(rollout, ())
                planned.append(Rollout(rollout, group, attempt, *example, failed, calls))
    return planned


class Runner:
    """Runs an agent's rollouts through a door of its own, and journals what becomes of them."""

    def __init__(
        self,
        service: Service,
        sampler: Callable[[Checkpoint], Sampler],
        play: Play,
        chat: Chat,
        *,
        run: str,
        run_seed: int,
        concurrency: int,
        timeout_seconds: float,
        replay: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self._service = service
        self._sampler = sampler
        self._play_agent = play
        self._run = run
        self._concurrency = concurrency
        self._timeout = timeout_seconds
        self._replay = replay
        self._token = secrets.token_urlsafe(32)
        self._door = Door(
            chat, self._token, self._record, WHOLE, run_seed, begin=self._begin, max_calls=max_calls
        )
        self._journal: Journal | None = None
        self._limits: set[asyncio.Timeout] = set()

    def __enter__(self) -> Self:
        self._door.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._door.__exit__(*error)

    def collect(
        self, rollouts: Sequence[Rollout], journal: Path, checkpoint: Checkpoint, sampling: Sampling
    ) -> None:
        """Play all rollouts, `concurrency` at a time; when this returns, `journal` shows every end.

        Raises EngineDied if the engine does; what was journalled until then stays.
        """
        self._door.policy = Policy(self._sampler(checkpoint), checkpoint.version)
        self._door.sampling = sampling
        with Journal(journal) as self._journal:
            asyncio.run(self._played(rollouts, journal.stem))

    def _begin(self, begun: Begun) -> None:
        assert self._journal is not None, "a call was begun while no batch was open"
        self._journal.append_soon(begun_span(begun, self._run))

    async def _record(self, completion: Completion) -> None:
        assert self._journal is not None, "a call was answered while no batch was open"
        await self._journal.append(call_span(completion, self._run))

    async def _played(self, rollouts: Sequence[Rollout], batch: str) -> None:
        await self._service.while_alive(self._play_all(rollouts), f"the rollouts of {batch}")

    async def _play_all(self, rollouts: Sequence[Rollout]) -> None:
        asyncio.get_running_loop().set_task_factory(contained_task)
        places = asyncio.Semaphore(self._concurrency)
        holding = asyncio.create_task(self._hold_clocks())
        try:
            await asyncio.gather(*(self._play(rollout, places) for rollout in rollouts))
        finally:
            holding.cancel()

    async def _hold_clocks(self) -> None:
        """While the disk is full no answer leaves the door, which is not the rollouts' time."""
        assert self._journal is not None
        while True:
            await asyncio.sleep(HOLD_SECONDS)
            for limit in [*self._limits] if self._journal.full else ():
                if not limit.expired():
                    limit.reschedule((limit.when() or 0.0) + HOLD_SECONDS)

    async def _within_time(self, rollout: Rollout) -> float:
        async with asyncio.timeout(self._timeout) as limit:
            self._limits.add(limit)
            try:
                return await self._play_agent(rollout.example, self._endpoint(rollout))
            finally:
                self._limits.discard(limit)

    async def _play(self, rollout: Rollout, places: asyncio.Semaphore) -> None:
        assert self._journal is not None
        async with places:
            started = datetime.now(UTC)
            outcome, refused = await self._outcome(rollout)
            ended = datetime.now(UTC)
        span = self._end(rollout, outcome, (started, ended))
        if refused:
            span["attributes"]["calls_refused"] = refused
        await self._journal.append(span)

    def _end(
        self, rollout: Rollout, outcome: float | Exception, times: tuple[datetime, datetime]
    ) -> Span:
        name, run = (rollout.id, rollout.attempt), self._run
        if isinstance(outcome, Exception):
            span = error_span(*name, outcome, *times, run_id=run)
        else:
            span = reward_span(*name, outcome, *times, run_id=run)
        example = {"example_id": rollout.example_id, "example": rollout.example}
        return {**span, "attributes": example}

    async def _outcome(self, rollout: Rollout) -> tuple[float | Exception, int]:
        """The rollout's reward, or why there is none; and how many calls the door refused it."""
        outcome: float | Exception
        recorded = rollout.recorded if self._replay else ()
        self._door.admit(rollout.id, rollout.attempt, recorded, rollout.failures)
        try:
            outcome = await self._within_time(rollout)
        except Exception as error:  # noqa: BLE001  An agent may raise anything; here it is a row.
            self._service.check()  # unless the engine has died, which is no fault of the agent
            outcome = error
        finally:
            late = self._door.dismiss(rollout.id, rollout.attempt)
            what = f"the last calls of {rollout.id}"
            refused = await self._service.while_alive(asyncio.wrap_future(late), what)
        return outcome, refused

    def _endpoint(self, rollout: Rollout) -> Endpoint:
        url = self._door.url(rollout.id, rollout.attempt, POLICY)
        return Endpoint(base_url=url, api_key=self._token, model=POLICY)


def _recorded(spans: Sequence[Span]) -> tuple[set[str], Counter[str], dict[str, int]]:
    """The rollouts a journal shows as rewarded, how often each failed, and its last attempt."""
    rewarded: set[str] = set()
    failures: Counter[str] = Counter()
    attempts: dict[str, int] = {}
    for span in spans:
        rollout = span["rollout_id"]
        attempts[rollout] = max(span["attempt"], attempts.get(rollout, 0))
        if span["kind"] == REWARD:
            rewarded.add(rollout)
        failures[rollout] += span["kind"] == ERROR
    return rewarded, failures, attempts
