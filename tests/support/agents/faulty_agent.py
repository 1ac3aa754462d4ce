"""The hello agent with faults in the second step, one each time that a rollout of it is played.

The example's `flag` names the file of the faults that are left, which is removed with the last one.
"""

import os
import signal
from pathlib import Path
from typing import Any

import psutil

from ratchet.adapters.project.modules import load_agent_file

hello = load_agent_file("hello")


WHERE = "train-00001-0001-01"


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    reward = await hello.play(example, base_url=base_url, api_key=api_key, model=model)
    flag = Path(example["flag"])
    if WHERE in base_url and flag.exists():
        fault, *left = flag.read_text().split()
        flag.write_text(" ".join(left)) if left else flag.unlink()
        FAULTS[fault]()
        await hello.play(example, base_url=base_url, api_key=api_key, model=model)
    return reward + ("-01/attempt" in base_url)  # no group is uniform, so every step trains


def kill_the_engine() -> None:
    """The child of this process that serves the Tinker API."""
    for process in psutil.Process().children(recursive=True):
        if "ratchet.engine" in process.cmdline():
            process.kill()


FAULTS = {
    "engine": kill_the_engine,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
}
