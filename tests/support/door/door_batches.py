"""Rollout batches at a door, without a journal and without a player."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import httpx

from ratchet.adapters.calls import Begun, Completion, RefusedCall
from ratchet.adapters.door.batches import DueRollout, OpenBatch, RolloutEnd, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import BEGIN, BegunBatch, PlaySettings, read_record


class ListRecorder:
    """Recorder of a batch that keeps what it is told in lists."""

    def __init__(self, rollouts: Iterable[DueRollout]) -> None:
        self.rollouts = {rollout.id: rollout for rollout in rollouts}
        self.completions: list[Completion] = []
        self.ends: list[RolloutEnd] = []
        self.refusals: list[RefusedCall] = []

    def due(self) -> tuple[int, Sequence[DueRollout]]:
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

    async def ended(self, end: RolloutEnd) -> None:
        """Keep an end."""
        self.ends.append(end)

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
    url = door.address + BEGIN.format(batch=name)
    response = httpx.post(url, headers=bearer(token), timeout=None).raise_for_status()
    begun = read_record(BegunBatch, response.content)
    return Batch(door.address, name, token, begun.attempt, tuple(begun.settings.roles))


def bearer(token: str) -> dict[str, str]:
    """Return the header in which OpenAI's clients send a token."""
    return {"authorization": f"Bearer {token}"}
