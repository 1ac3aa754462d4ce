"""The hello agent, which once kills a worker, or a process of a pool: if `flag` is a folder.

The folder's name says which of them. It happens in the second step, when two have come, to one that
has played in the first.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from agents import hello

NEEDED = 2


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    folder = Path(example["flag"]).resolve()
    reward = await hello.play(example, base_url=base_url, api_key=api_key, model=model)
    if folder.is_dir():
        victim = os.getpid() if folder.name == "process" else os.getppid()
        (folder / f"{victim}.came").touch()
        if "train-00001" not in base_url:
            (folder / f"{victim}.played").touch()
        elif (folder / f"{victim}.played").exists():
            await kill_once(folder, victim)
    again = await hello.play(example, base_url=base_url, api_key=api_key, model=model)
    return reward + again + ("-01/attempt" in base_url)  # no group is uniform, so every step trains


async def kill_once(folder: Path, victim: int) -> None:
    while len(list(folder.glob("*.came"))) < NEEDED:
        await asyncio.sleep(0.02)
    try:
        with (folder / "killed").open("x") as killed:
            killed.write(str(victim))
    except FileExistsError:
        return
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(600)
