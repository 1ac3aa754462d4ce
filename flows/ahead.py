"""Prefect's embedded server, started while the flow is still being imported."""

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
