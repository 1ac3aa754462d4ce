"""Rollout batches at a door, without a journal and without a player."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import httpx

from adapters.calls import Begun, Completion, RefusedCall
from adapters.door.batches import OpenBatch, PlannedRollout, RolloutEnd, SampledBy
from adapters.door.door import Door
from adapters.harness.batches import Batch
from adapters.player_protocol import (
    BATCH,
    BegunBatch,
    PlaySettings,
    read_record,
    rollout_key,
)


class ListRecorder:
    """Recorder of a batch that keeps what it is told in lists."""

    def __init__(self, rollouts: Iterable[PlannedRollout]) -> None:
        self.rollouts = {rollout.id: rollout for rollout in rollouts}
        self.completions: list[Completion] = []
        self.ends: list[RolloutEnd] = []
        self.refusals: list[RefusedCall] = []

    def plan(self) -> tuple[int, Sequence[PlannedRollout]]:
        """Return the rollouts that have not ended; the door counts the attempts."""
        ended = {end.rollout_id for end in self.ends}
        return 0, [rollout for rollout in self.rollouts.values() if rollout.id not in ended]

    def begun(self, begun: Begun) -> None:
        """Keep nothing of a call that is about to be sampled."""

    def refused(self, call: RefusedCall) -> None:
        """Keep a refused call."""
        self.refusals.append(call)

    async def answered(self, completion: Completion) -> None:
        """Keep a completion."""
        self.completions.append(completion)

    async def ended(self, end: RolloutEnd) -> bool:
        """Keep an end, which closes no batch."""
        self.ends.append(end)
        return False

    def remember(self, rollout_id: str, recorded: Sequence[Completion]) -> None:
        """Give the next attempt at a rollout these recorded calls."""
        self.rollouts[rollout_id] = replace(self.rollouts[rollout_id], recorded=recorded)


def batch_at(
    door: Door, name: str, recorder: ListRecorder, sampled_by: SampledBy, agent: str = "hello"
) -> OpenBatch:
    """Return a batch for the door to open; an agent has 10 s, and 8 rollouts are played at once."""
    return OpenBatch(name, recorder, sampled_by, PlaySettings(agent, list(door.roles), 8, 10.0))


def begin(door: Door, name: str, token: str) -> Batch:
    """Begin the next attempt at an open batch, as a player does."""
    url = door.address + BATCH.format(batch=name) + "/begin"
    response = httpx.post(url, headers=bearer(token), timeout=None).raise_for_status()
    begun = read_record(BegunBatch, response.content)
    settings = begun.settings
    return Batch(
        door.address, name, token, begun.attempt, tuple(settings.roles), settings.timeout_seconds
    )


def bearer(token: str) -> dict[str, str]:
    """Return the header in which OpenAI's clients send a token."""
    return {"authorization": f"Bearer {token}"}


class KeyOfRollout(httpx.Auth):
    """The authorization of each request: the key of the rollout in its path, or the token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # pyright: ignore[reportIncompatibleMethodOverride]
        request.headers.update(bearer(key_for(self._token, request.url.path)))
        yield request


def key_for(token: str, path: str) -> str:
    """Return what opens a path or a URL: a rollout's key below one of its roles, or the token."""
    found = re.search(r"/rollout/([^/]+)/attempt/(\d+)/role/", path)
    return rollout_key(token, found[1], int(found[2])) if found else token
