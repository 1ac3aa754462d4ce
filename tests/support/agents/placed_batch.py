"""Rollouts of a command, each in a place of its own, at a door that answers what a test says."""

import asyncio
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ratchet.adapters.calls import POLICY, Policy
from ratchet.adapters.door.batches import DueRollout, OpenBatch, RolloutEnd, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.tasks.settings.rollouts import PlaceOfRollouts
from tests.support.door.door_batches import ListRecorder
from tests.support.door.opened_door import SAMPLING, Scripted

CURL = """
ask() {
    curl --silent --fail "$OPENAI_BASE_URL/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
        --data '{"model": "policy", "messages": [{"role": "user", "content": "ping"}]}'
}
"""
"""Function of a shell that asks the policy."""


def shell(program: str) -> str:
    """Return the agent that runs a program of a shell."""
    return f"command:{shlex.join(['sh', '-c', program])}"


def rollout_id(number: int) -> str:
    return f"train-00000-{number:04d}-00"


def play_in_places(
    door: Door,
    agent: str,
    examples: Iterable[Mapping[str, Any]],
    folder: Path,
    *,
    seconds: float = 60.0,
    **place: Any,
) -> list[RolloutEnd]:
    """Play a rollout of each example in a place below `folder`; return the ends in their order."""
    rollouts = [DueRollout(rollout_id(n), dict(one)) for n, one in enumerate(examples)]
    settings = PlaySettings(
        agent, [POLICY], 8, seconds, PlaceOfRollouts(**{"kept": "failed", **place}).of(folder)
    )
    policy = Policy(cast(Any, Scripted()), "v0")
    recorder = ListRecorder(rollouts)
    batch = OpenBatch("train-00000.0", recorder, SampledBy({POLICY: policy}, SAMPLING), settings)
    with door.opened(batch) as token:
        asyncio.run(play_batch(door.address, batch.name, token))
    return sorted(recorder.ends, key=lambda end: end.rollout_id)
