"""CrewAI's rollouts, through LiteLLM or not, open nothing but connections to the door."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.calls import POLICY, Policy
from ratchet.adapters.door.batches import DueRollout, OpenBatch, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.rewards import Reward
from tests.support.door.door_batches import ListRecorder
from tests.support.door.opened_door import CALL, SAMPLING, Scripted

ROOT = Path(__file__).parents[3]
ASKS_ITS_NAME = "subprocess.Popen uname"  # Python's own `platform`


@pytest.mark.story
def test_crewai_rollouts_open_nothing_but_loopback(open_door: Door, tmp_path: Path) -> None:
    sampler: Any = Scripted()
    notes, said = tmp_path / "notes", iter([CALL, "A cat.<|im_end|>"] * 2)

    async def say_next() -> None:
        sampler.text = next(said)

    sampler.hold = say_next
    recorder = ListRecorder(
        DueRollout(f"train-00000-{n:04d}-00", {"noun": "cat", "provider": provider})
        for n, provider in enumerate(("openai", "ratchet"))
    )
    one_at_a_time = PlaySettings(
        "tests.support.agents.silent_crew:play", [POLICY], 1, timeout_seconds=200.0
    )
    sampled_by = SampledBy({POLICY: Policy(sampler, "v0")}, SAMPLING)
    batch = OpenBatch("train-00000.0", recorder, sampled_by, one_at_a_time)
    with open_door.opened(batch) as token:
        arguments = [str(notes), open_door.address, batch.name, token]
        command = [sys.executable, "-m", "tests.support.agents.silent_crew", *arguments]
        subprocess.run(command, cwd=ROOT, env=bare_environment(tmp_path), check=True, timeout=280)
    assert [end.outcome for end in recorder.ends] == [Reward(1.0)] * 2
    assert len(recorder.completions) == 4
    noted = set(notes.read_text().splitlines()) - {ASKS_ITS_NAME}
    assert noted == {"socket.connect 127.0.0.1", "socket.getaddrinfo 127.0.0.1"}


def bare_environment(home: Path) -> dict[str, str]:
    """Return the environment of a user who has set nothing and has never run CrewAI."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
