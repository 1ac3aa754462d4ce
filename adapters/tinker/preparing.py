"""The engine's preparation of a base: a GGUF file is dequantised, a model of the hub downloaded."""

import errno
import sys
from pathlib import Path

from adapters.errors import ServiceError
from adapters.process.watched import Tell, run_watched

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MAKE_SPACE = "make space on its disk, or name a folder of another one by XDG_CACHE_HOME"
REFUSAL = "engine: "
"""Beginning of the line in which the engine says what it cannot read."""


def prepare_base(base: str, tell: Tell = lambda share, memory: None) -> Path:
    """Return the folder of a base's files, which the first call writes into the user's cache.

    ServiceError if the base cannot be prepared.
    """
    command = [sys.executable, "-P", "-m", "engine", "--prepare", "--base-model", base]
    ended = run_watched(command, tell)
    if ended.status:
        said = ended.last_line()
        if said.startswith(REFUSAL):
            raise ServiceError(said.removeprefix(REFUSAL))
        way_on = MAKE_SPACE if ended.errno() in FULL else "mend that, and give the command again"
        raise ServiceError(f"{base} cannot be prepared ({said}); {way_on}")
    return Path(ended.stdout.splitlines()[-1])
