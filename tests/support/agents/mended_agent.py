"""The agent hello, which fails at held-out examples until somebody mends it.

While the folder of runs has a file `broken`, a rollout fails whose id has one of the words in it.
"""

import os
from pathlib import Path
from typing import Any

from ratchet.adapters.project.modules import load_agent_file

hello = load_agent_file("hello")


async def play(example: dict[str, Any], *, base_url: str, **endpoint: str) -> float:
    broken = Path(os.environ["RATCHET_RUNS"], "broken")
    if broken.exists() and any(word in base_url for word in broken.read_text().split()):
        raise LookupError("the key of the shop has expired")
    return await hello.play(example, base_url=base_url, **endpoint)
