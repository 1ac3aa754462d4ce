"""Rollouts that were lost with their player, played again in processes of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.batches import RolloutEnd
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import Failure, shorten_message
from ratchet.adapters.rewards import Reward
from tests.adapters.harness.test_player import TIMEOUT, batch_of
from tests.support.door.door_batches import bearer, begin
from tests.support.door.opened_door import ASK, Scripted
from tests.support.processes import ROOT, wait_until

KEY = "0123456789abcdef"


def misbehaves(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> Any:
    """Do what the example says, after a call."""
    body = {"model": model, "messages": ASK}
    url = f"{base_url}/chat/completions"
    httpx.post(url, json=body, headers=bearer(api_key)).raise_for_status()
    match example["does"]:
        case "exits":
            sys.stderr.write(f"the key is {api_key}, and the end is near")
            sys.stderr.flush()
            os._exit(3)
        case "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("\ud800" * 20_000)
        case "prints":
            sys.stdout.write('{"reward": 7}\n')
            subprocess.run(["sh", "-c", "echo 8"], check=True)
        case "never ends":
            time.sleep(600)
        case _:
            Path(example["file"]).write_text(f"{os.getpid()} {os.environ['APART']}")
    return 1.0


async def blocks(example: dict[str, Any], **_: str) -> float:
    """Stop the event loop for good."""
    time.sleep(600)
    return 0.0


def play_again(door: Door, agent: Any, examples: Iterable[dict[str, Any]]) -> list[RolloutEnd]:
    """Lose the first player of a batch, and play the batch; return the ends of the examples."""
    batch, recorder = batch_of(agent, examples, Scripted(), TIMEOUT)
    with door.opened(batch) as token:
        begin(door, batch.name, token)
        asyncio.run(play_batch(door.address, batch.name, token))
    return sorted(recorder.ends, key=lambda end: end.rollout_id)


@pytest.mark.story
def test_what_an_agent_does_to_its_process_costs_only_its_rollout(
    open_door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APART", "yes")
    does = ["exits", "kills", "raises", "prints", "never ends", "works"]
    file = tmp_path / "process"
    ends = play_again(open_door, misbehaves, ({"does": d, "file": str(file)} for d in does))
    exits, kills, raises, *rest, works = [end.outcome for end in ends]
    prints, never_ends = rest
    assert isinstance(exits, Failure)
    assert isinstance(kills, Failure)
    assert isinstance(never_ends, Failure)
    assert (exits.kind, kills.kind, never_ends.kind) == ("AgentExit", "AgentExit", "TimeoutError")
    assert "ended with exit status 3 without an outcome" in exits.message
    assert exits.message.endswith("the key is ***, and the end is near")
    assert "was killed (signal 9) without an outcome" in kills.message
    assert f"longer than {TIMEOUT:g} s of its own time" in never_ends.message
    assert raises == Failure("ValueError", shorten_message("?" * 1_000_000))
    assert [prints, works] == [Reward(1.0)] * 2
    process, variable = file.read_text().split()
    assert (int(process) != os.getpid(), variable) == (True, "yes")


def test_a_blocked_event_loop_is_ended_when_its_time_is_over(open_door: Door) -> None:
    [end] = play_again(open_door, blocks, [{}])
    assert isinstance(end.outcome, Failure)
    assert end.outcome.kind == "TimeoutError"


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is a program of its own, which starts the process as a player does, and dies."""
    started = tmp_path / "process"
    agent = "tests.adapters.harness.test_isolated:waits"
    endpoints = {POLICY: {"base_url": "http://127.0.0.1:9", "api_key": KEY, "model": "m"}}
    script = f"""
import asyncio
from ratchet.adapters.harness.player import own_process

async def play():
    async with own_process({agent!r}, {{"file": {str(started)!r}}}, {endpoints}) as end:
        await end

asyncio.run(play())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    wait_until("the agent", lambda: started.exists() and started.read_text() != "")
    child = psutil.Process(int(started.read_text()))
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs([child], timeout=60)
    assert left == []


async def waits(example: dict[str, Any], **_: str) -> float:
    """Say which process this is, and wait."""
    Path(example["file"]).write_text(str(os.getpid()))
    await asyncio.sleep(600)
    return 0.0
