"""shard → rollouts: the agent, group_size times an example. A failed one is a row, not a crash."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from adapters.players import HERE, Job, Player, PlayerLost, PlayersFailed
from fastapi import APIRouter

from adapters.calls import POLICY, Begun, Completion, Example, Policy, Sampler, Sampling
from adapters.cancelling import cancel_and_wait
from adapters.chat import Chat
from adapters.door.backends import Backend
from adapters.door.door import Door
from adapters.harness.agents import Endpoint, contained_task
from adapters.harness.current_rollout import asking
from adapters.harness.loop_watchdog import watch_event_loop
from adapters.harness.rewards import Reward
from adapters.loopback import Listening
from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint
from tasks.ends import end_spans
from tasks.journal import Journal, read_journal
from tasks.recorded_calls import recorded_calls
from tasks.shards import Example as Row
from tasks.spans import ERROR, REWARD, Span, begun_span, call_span

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
    alone: bool = False
    """Whether it may have ended the process in which it was played before."""


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
        player: Player,
        chat: Chat,
        *,
        run: str,
        run_seed: int,
        concurrency: int,
        timeout_seconds: float,
        replay: bool = True,
        max_calls: int | None = None,
        roles: Mapping[str, Backend | str] | None = None,
        others: Mapping[str, Callable[[int], Policy]] | None = None,
        listening: Listening | None = None,
        beside: APIRouter | None = None,
    ) -> None:
        listening = listening or Listening()
        self._service = service
        self._sampler = sampler
        self._player = player
        self._run = run
        self._concurrency = concurrency
        self._timeout = timeout_seconds
        self._replay = replay
        self._token = secrets.token_urlsafe(32)
        self._others = others or {}
        self._roles = {POLICY: POLICY, **(roles or {})}
        self._door = Door(
            chat,
            self._token,
            self._record,
            WHOLE,
            run_seed,
            listening.port,
            begin=self._begin,
            max_calls=max_calls,
            roles=self._roles,
            host=listening.host,
            beside=beside,
        )
        self._journal: Journal | None = None
        self._limits: set[asyncio.Timeout] = set()
        self._answered: dict[tuple[str, int], dict[str, list[int]]] = {}
        self._where: dict[str, str] = {}
        self._lost: dict[str, tuple[int, PlayerLost]] = {}

    def __enter__(self) -> Self:
        self._door.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._door.__exit__(*error)

    @property
    def door(self) -> str:
        """The door's address."""
        return self._door.address

    def collect(
        self, rollouts: Sequence[Rollout], journal: Path, checkpoint: Checkpoint, sampling: Sampling
    ) -> None:
        """Play all rollouts, `concurrency` at a time; when this returns, `journal` shows every end.

        Of a rollout whose player was lost it shows none, and it is to be planned once more. The
        other policies are sampled after as many steps as the checkpoint. Raises EngineDied if the
        engine does; what was journalled until then stays.
        """
        self._door.policy = Policy(self._sampler(checkpoint), checkpoint.version)
        self._door.others = {name: at(checkpoint.step) for name, at in self._others.items()}
        self._door.sampling = sampling
        with Journal(journal) as self._journal:
            asyncio.run(self._played([*map(self._anew, rollouts)], journal.stem))

    def _anew(self, rollout: Rollout) -> Rollout:
        """With an attempt that no player speaks for that was lost and lives on somewhere."""
        if rollout.id not in self._lost:
            return rollout
        attempt, lost = self._lost[rollout.id]
        return replace(rollout, attempt=max(rollout.attempt, attempt + 1), alone=lost.alone)

    def _begin(self, begun: Begun) -> None:
        assert self._journal is not None, "a call was begun while no batch was open"
        self._journal.append_soon(begun_span(begun, self._run))

    async def _record(self, completion: Completion) -> None:
        assert self._journal is not None, "a call was answered while no batch was open"
        await self._journal.append(call_span(completion, self._run))
        place = completion.place
        self._answered[place.rollout_id, place.attempt][place.role].append(place.call)

    async def _played(self, rollouts: Sequence[Rollout], batch: str) -> None:
        await self._service.while_alive(self._play_all(rollouts), f"the rollouts of {batch}")

    async def _play_all(self, rollouts: Sequence[Rollout]) -> None:
        asyncio.get_running_loop().set_task_factory(contained_task)
        places = asyncio.Semaphore(self._concurrency)
        holding = asyncio.create_task(self._hold_clocks())
        playing = [asyncio.create_task(self._play(rollout, places)) for rollout in rollouts]
        async with watch_event_loop():
            try:
                await asyncio.gather(*playing)
            finally:
                await cancel_and_wait(holding, *playing)

    async def _hold_clocks(self) -> None:
        """While the disk is full no answer leaves the door, which is not the rollouts' time."""
        assert self._journal is not None
        while True:
            await asyncio.sleep(HOLD_SECONDS)
            for limit in [*self._limits] if self._journal.full else ():
                if not limit.expired():
                    limit.reschedule((limit.when() or 0.0) + HOLD_SECONDS)

    async def _within_time(self, rollout: Rollout) -> Reward:
        job = Job(rollout.example, self._endpoints(rollout), rollout.alone)
        async with self._player.begun(job) as playing, asyncio.timeout(self._timeout) as limit:
            self._where[rollout.id] = playing.where
            self._limits.add(limit)
            try:
                return await playing.reward
            finally:
                self._limits.discard(limit)

    async def _play(self, rollout: Rollout, places: asyncio.Semaphore) -> None:
        assert self._journal is not None
        async with places:
            started = datetime.now(UTC)
            outcome, refused = await self._outcome(rollout)
            ended = datetime.now(UTC)
        calls = self._answered.pop((rollout.id, rollout.attempt))
        where = self._where.pop(rollout.id, HERE)
        if isinstance(outcome, PlayerLost):
            self._lost[rollout.id] = rollout.attempt, outcome
            return
        *credits, end = end_spans(
            rollout.id, rollout.attempt, outcome, calls, (started, ended), self._run
        )
        end["attributes"] = {"example_id": rollout.example_id, "example": rollout.example}
        if refused:
            end["attributes"]["calls_refused"] = refused
        if where != HERE:
            end["attributes"]["player"] = where
        for credit in credits:
            self._journal.append_soon(credit)
        await self._journal.append(end)

    async def _outcome(self, rollout: Rollout) -> tuple[Reward | Exception, int]:
        """The rollout's reward, or why there is none; and how many calls the door refused it."""
        outcome: Reward | Exception
        recorded = rollout.recorded if self._replay else ()
        name = rollout.id, rollout.attempt
        self._answered[name] = {role: [] for role in self._roles}
        self._door.admit(*name, recorded, rollout.failures, rollout.example)
        try:
            with asking(partial(self._door.ask, *name), self._roles):
                outcome = await self._within_time(rollout)
        except PlayersFailed:
            raise
        except Exception as error:  # noqa: BLE001  An agent may raise anything; here it is a row.
            self._service.check()  # unless the engine has died, which is no fault of the agent
            outcome = error
        finally:
            late = self._door.dismiss(*name)
            what = f"the last calls of {rollout.id}"
            refused = await self._service.while_alive(asyncio.wrap_future(late), what)
        return outcome, refused

    def _endpoints(self, rollout: Rollout) -> dict[str, Endpoint]:
        """Where the agent finds each of its roles."""
        urls = {role: self._door.url(rollout.id, rollout.attempt, role) for role in self._roles}
        return {
            role: Endpoint(base_url=url, api_key=self._token, model=role)
            for role, url in urls.items()
        }


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
