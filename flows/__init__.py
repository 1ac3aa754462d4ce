"""The flows of Ratchet, whose import prepares the process in which they run.

Libraries send no telemetry unless the user has turned that on, no client uses a proxy for this
machine, and as many files may be open as the system allows.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("adapters", "durable", "engine", "tasks")
"""The packages that `flows` imports or starts."""


def check_packages() -> None:
    """Raise ImportError if Python finds another module by the name of one of our PACKAGES.

    Python does if that module's folder comes first on its path: by PYTHONPATH, by `python -m`, or
    in a worker of Prefect's. The command `ratchet` prints the sentence without a stack trace.
    """
    ours = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded else find_spec(name)
        [place, *_] = (spec and (spec.submodule_search_locations or [spec.origin])) or [None]
        if place is None or Path(place).resolve().parent == ours:
            continue
        said = (
            f"Python finds {place} in place of Ratchet's own package {name!r}; rename yours, or "
            "take its folder from the front of Python's path (PYTHONPATH, `python -m`)"
        )
        if Path(sys.argv[0]).name == "ratchet":
            sys.stderr.write(f"ratchet: {said}\n")
            raise SystemExit(2)
        raise ImportError(said)


check_packages()  # before one of them is imported

from adapters.clients.libraries import send_no_telemetry  # noqa: E402
from adapters.network.addresses import spare_loopback  # noqa: E402
from adapters.process.open_files import raise_limit  # noqa: E402

send_no_telemetry()  # before Prefect is imported
spare_loopback()  # before a client is made
raise_limit()
