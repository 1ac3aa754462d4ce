"""CrewAI's rollouts, through LiteLLM or not, open nothing but connections to the door."""

import os
import subprocess
import sys
from pathlib import Path

from tests.opened_door import CALL, Opened

ROOT = Path(__file__).parent.parent
ASKS_ITS_NAME = "subprocess.Popen uname"  # Python's own `platform`


def test_crewai_rollouts_open_nothing_but_loopback(opened: Opened, tmp_path: Path) -> None:
    notes, said = tmp_path / "notes", iter([CALL, "A cat.<|im_end|>"] * 2)

    async def say_next() -> None:
        opened.say(next(said))

    opened.sampler.hold = say_next
    program = [sys.executable, "-m", "tests.silent_crew"]
    command = [*program, str(notes), opened.url, opened.token]
    subprocess.run(command, cwd=ROOT, env=bare_environment(tmp_path), check=True, timeout=280)
    assert len(opened.spans) == 4
    noted = set(notes.read_text().splitlines()) - {ASKS_ITS_NAME}
    assert noted == {"socket.connect 127.0.0.1", "socket.getaddrinfo 127.0.0.1"}


def bare_environment(home: Path) -> dict[str, str]:
    """Return the environment of a user who has set nothing and has never run CrewAI."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
