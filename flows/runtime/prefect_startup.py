"""Start-up of Prefect: its settings, and its embedded server, begun before Prefect is needed."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def start_server() -> Iterator[Callable[[], None]]:
    """Begin to start Prefect's embedded server, unless another server is set.

    Prefect itself would start it when the flow is called. Yields a function that waits until the
    server answers.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        yield lambda: None
        return
    from prefect.server.api.server import SubprocessASGIServer

    with ThreadPoolExecutor(1, "prefect-server") as starting:
        yield starting.submit(SubprocessASGIServer().start).result


def quiet_prefect(verbose: bool) -> None:
    """Set Prefect's log level and time-outs, which it reads when it is imported."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
