"""The bridge as a program: it is told of its server on standard input, and ends with that."""

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from types import ModuleType


def _spare_the_sdk() -> None:
    """Have the SDK's messages be importable without the SDK, which imports torch for seconds."""
    package, found = ModuleType("tinker"), find_spec("tinker")
    assert found is not None
    package.__path__ = found.submodule_search_locations or []
    sys.modules["tinker"] = package


if __name__ == "__main__":
    _spare_the_sdk()

from ratchet.adapters.network.app_server import AppServer  # noqa: E402
from ratchet.adapters.wires.bridge import Bridge  # noqa: E402
from ratchet.adapters.wires.older_server import UNLOADING_SECONDS  # noqa: E402


def main() -> None:
    """Serve until standard input ends, whatever ends the run; then give back what it has taken."""
    url, key, datums = json.loads(sys.stdin.readline())
    bridge = Bridge(url, key, datums)
    server = AppServer(bridge)
    server.start()
    print(server.url, flush=True)  # noqa: T201
    sys.stdin.read()
    ending = asyncio.run_coroutine_threadsafe(bridge.end(), server.loop)
    try:
        ending.result(2 * UNLOADING_SECONDS)
    finally:
        os._exit(0)  # long polls are under way, which nobody waits for


if __name__ == "__main__":
    main()
