"""An agent for the players' tests: it does what its example says, and asks nobody."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> Any:
    does = example["does"]
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "die once" and Path(example["flag"]).exists():
        Path(example["flag"]).unlink()
        os._exit(7)
    if does == "exit":
        sys.exit(3)
    if does == "raise":
        raise KeyError(base_url)
    if does == "hang":
        Path(example["flag"]).touch()
        try:
            await asyncio.sleep(600)
        finally:
            Path(example["flag"]).unlink()
    if does == "block":
        Path(example["flag"]).touch()
        time.sleep(600)
    sys.stdout.write("what an agent prints is not heard as an answer\n")
    return example.get("reward", float(os.getpid()))
