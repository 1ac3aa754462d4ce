"""shard → rollouts: the agent, group_size times an example. A failed one is a row, not a crash."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from adapters.agents import Endpoint, Example, Play
from adapters.calls import POLICY, Completion, Policy, Sampling
from adapters.chat import Chat
from adapters.door import Door
from adapters.tinker import Service
from tasks.checkpoints import Checkpoint
from tasks.journal import Journal, read_journal
from tasks.shards import Example as Row
from tasks.spans import Span, call_span, error_span, reward_span

WHOLE = Sampling(max_tokens=1, temperature=1.0, top_p=1.0, top_k=-1)
"""What the door samples before a batch says how."""


@dataclass(frozen=True)
class Rollout:
    """One attempt of the agent at one example."""

    id: str
    group: str
    attempt: int
    example_id: int
    example: Example


def plan(batch: str, shard: Sequence[Row], group_size: int, journal: Path) -> list[Rollout]:
    """The rollouts of a batch that its journal does not show as ended, each as a new attempt."""
    ended, attempts = _recorded(journal)
    planned = []
    for place, row in enumerate(shard):
        group = f"{batch}-{place:04d}"
        for index in range(group_size):
            rollout = f"{group}-{index:02d}"
            if rollout not in ended:
                attempt = attempts.get(rollout, -1) + 1
                planned.append(Rollout(rollout, group, attempt, row["example_id"], row["example"]))
    return planned


class Runner:
    """Runs an agent's rollouts through a door of its own, and journals what becomes of them."""

    def __init__(
        self,
        service: Service,
        play: Play,
        chat: Chat,
        *,
        run: str,
        run_seed: int,
        concurrency: int,
        timeout_seconds: float,
    ) -> None:
        self._service = service
        self._play_agent = play
        self._run = run
        self._concurrency = concurrency
        self._timeout = timeout_seconds
        self._token = secrets.token_urlsafe(32)
        self._door = Door(chat, self._token, self._record, WHOLE, run_seed)
        self._journal: Journal | None = None

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
        client = self._service.client.create_sampling_client(model_path=checkpoint.sampler)
        self._door.policy = Policy(self._service.result(client), checkpoint.version)
        self._door.sampling = sampling
        with Journal(journal) as self._journal:
            asyncio.run(self._service.while_alive(self._play_all(rollouts)))

    async def _record(self, completion: Completion) -> None:
        assert self._journal is not None, "a call was answered while no batch was open"
        await self._journal.append(call_span(completion, self._run))

    async def _play_all(self, rollouts: Sequence[Rollout]) -> None:
        places = asyncio.Semaphore(self._concurrency)
        await asyncio.gather(*(self._play(rollout, places) for rollout in rollouts))

    async def _play(self, rollout: Rollout, places: asyncio.Semaphore) -> None:
        assert self._journal is not None
        async with places:
            started = datetime.now(UTC)
            outcome = await self._outcome(rollout)
            ended = datetime.now(UTC)
        await self._journal.append(self._end(rollout, outcome, started, ended))

    def _end(
        self, rollout: Rollout, outcome: float | Exception, started: datetime, ended: datetime
    ) -> Span:
        name, times, run = (rollout.id, rollout.attempt), (started, ended), self._run
        if isinstance(outcome, Exception):
            span = error_span(*name, outcome, *times, run_id=run)
        else:
            span = reward_span(*name, outcome, *times, run_id=run)
        example = {"example_id": rollout.example_id, "example": rollout.example}
        return {**span, "attributes": example}

    async def _outcome(self, rollout: Rollout) -> float | Exception:
        """The rollout's reward, or why there is none."""
        self._door.admit(rollout.id, rollout.attempt)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._play_agent(rollout.example, self._endpoint(rollout))
        except Exception as error:  # noqa: BLE001  An agent may raise anything; here it is a row.
            self._service.check()  # unless the engine has died, which is no fault of the agent
            return error
        finally:
            late = self._door.dismiss(rollout.id, rollout.attempt)
            await self._service.while_alive(asyncio.wrap_future(late))

    def _endpoint(self, rollout: Rollout) -> Endpoint:
        url = self._door.url(rollout.id, rollout.attempt, POLICY)
        return Endpoint(base_url=url, api_key=self._token, model=POLICY)


def _recorded(journal: Path) -> tuple[set[str], dict[str, int]]:
    """The rollouts a journal shows as ended, and the last attempt of every rollout it knows."""
    ended: set[str] = set()
    attempts: dict[str, int] = {}
    for span in read_journal(journal) if journal.exists() else []:
        rollout = span["rollout_id"]
        attempts[rollout] = max(span["attempt"], attempts.get(rollout, 0))
        if span["kind"] in ("reward", "error"):
            ended.add(rollout)
    return ended, attempts
