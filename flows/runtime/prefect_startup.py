"""What comes before Prefect is imported: its settings, and meanwhile its embedded server."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def server_begun() -> Iterator[Callable[[], None]]:
    """Where no Prefect server is set, begin to start the one that Prefect embeds.

    Prefect would start it when the flow is called. What is yielded returns when it answers.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        yield lambda: None
        return
    from prefect.server.api.server import SubprocessASGIServer

    with ThreadPoolExecutor(1, "prefect-server") as starting:
        yield starting.submit(SubprocessASGIServer().start).result


def quiet_prefect(verbose: bool) -> None:
    """Prefect reads its settings when it is imported."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
