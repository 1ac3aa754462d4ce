"""Rollout batches on a Dask cluster: one that lives elsewhere, or processes of this machine.

A batch is one Dask task, which calls the player that the flow's own threads call. The batch's token
travels as a secret, since a worker logs the arguments of a task that fails.
"""

import asyncio
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from ratchet.adapters.errors import PassingError, UserError
from ratchet.adapters.harness.agents import in_thread
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.harness.players_door import door_at
from ratchet.adapters.network.addresses import LOOPBACK, Certificate, Listener, spare_loopback
from ratchet.adapters.process.clock import Wait
from ratchet.adapters.process.event_loop import call_in_thread, cancel_and_wait, run_in_lasting_loop
from ratchet.adapters.process.open_files import raise_limit
from ratchet.durable.process import usable_cores

try:
    import dask.config
    from distributed import CancelledError, Client, Future, KilledWorker, LocalCluster, Security
except ModuleNotFoundError as error:
    raise UserError(
        f"rollouts.runner dask needs Dask, and there is no module {error.name}; install the extra "
        "`dask` (make setup has it), or give runner threads"
    ) from error

CONNECT_SECONDS = 600.0
"""The longest wait for a scheduler; then the batch fails, and is retried with a new client."""

CLUSTER_LOOK_SECONDS = 10.0
"""Time between two looks at whether the cluster has a worker."""

DOOR_LOOK_SECONDS, SILENT_SECONDS = 10.0, 60.0
"""Time between two looks of a worker at whether its batch is open, and the longest for one."""

TLS = "distributed.comm.tls.client"
"""The section of Dask's configuration that has the client's certificate and key."""


class DaskCluster:
    """A Dask cluster that plays batches.

    The client is made anew when it has lost its scheduler, since it has then lost its batches too.
    """

    def __init__(self, address: str, connect: Callable[[], Client]) -> None:
        self._address = address
        self._connect = connect
        self._connecting = threading.Lock()
        self._client = connect()
        self._without_worker: Wait | None = None

    async def play(self, door: str, batch: str, token: str) -> None:
        """Have a worker play a batch; if this is cancelled, the batch is withdrawn."""
        client = await in_thread(self._live_client)
        secret = SecretStr(token)
        future: Future[None] = client.submit(play_on_worker, door, batch, secret, pure=False)
        watching = asyncio.create_task(self._watch_for_workers(client))
        try:
            await in_thread(_result, future, batch)
        finally:
            future.release()
            await cancel_and_wait(watching)

    def close(self) -> None:
        self._client.close()

    def _live_client(self) -> Client:
        with self._connecting:
            if self._client.status != "running":
                self._client.close()
                self._client = self._connect()
            return self._client

    async def _watch_for_workers(self, client: Client) -> None:
        """Log again and again that the cluster has no worker, until it has one."""
        while True:
            await asyncio.sleep(CLUSTER_LOOK_SECONDS)
            if await in_thread(client.nthreads):
                self._without_worker = None
                continue
            what = f"a worker of the Dask cluster at {self._address}"
            self._without_worker = self._without_worker or Wait(what, None)
            self._without_worker.speak()


@contextmanager
def open_cluster(address: str | None, batches: int) -> Iterator[DaskCluster]:
    """Connect to the cluster at `address`, or start one here that plays `batches` at a time."""
    logging.getLogger("distributed").setLevel(logging.WARNING)
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # our errors say the same
    with ExitStack() as stack:
        if address is None:
            local = stack.enter_context(_local_cluster(batches))
            connect = partial(Client, local, set_as_default=False)
            cluster = DaskCluster(local.scheduler_address, connect)
        else:
            cluster = DaskCluster(address, partial(_connect, address))
        yield stack.enter_context(closing(cluster))


def play_on_worker(door: str, batch: str, token: SecretStr) -> None:
    spare_loopback()
    raise_limit()
    try:
        run_in_lasting_loop(play_while_open(door, batch, token.get_secret_value()))
    except httpx.TransportError as error:
        raise PassingError(
            f"{socket.gethostname()} could not reach the door at {door} for the batch {batch} "
            f"({type(error).__name__}: {error}); give a rollouts.door that every worker reaches"
        ) from None


async def play_while_open(door: str, batch: str, token: str) -> None:
    """Play a batch while its door has it open: a machine that is lost closes no connection."""
    playing = asyncio.create_task(play_batch(door, batch, token))
    try:
        async with door_at(door, batch, token) as asked:
            while not (await asyncio.wait([playing], timeout=DOOR_LOOK_SECONDS))[0]:
                await asked.look(SILENT_SECONDS)
        await playing
    finally:
        await cancel_and_wait(playing)


def listener_at(url: str) -> Listener:
    """Return what binds a door's URL, for https with the client's certificate of Dask."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    return Listener(parts.hostname or "", parts.port or 0, _certificate() if secure else None)


def _result(future: "Future[None]", batch: str) -> None:
    try:
        future.result()
    except (CancelledError, KilledWorker, OSError) as error:
        if future.status == "error" and not isinstance(error, KilledWorker):
            raise  # the batch itself has failed, on a worker that lives
        reason = " ".join(str(error).split())
        if isinstance(error, KilledWorker):
            last, killed = error.last_worker.address, error.allowed_failures + 1
            reason = (
                f"{killed} workers in turn were killed while they played it, the last at {last}"
            )
        raise PassingError(
            f"the Dask cluster lost the batch {batch} ({reason}); look at the logs of its "
            "scheduler and its workers"
        ) from error


def _certificate() -> Certificate:
    """Return the client's certificate of Dask's configuration; UserError if there is none."""
    certificate, key = (dask.config.get(f"{TLS}.{part}", None) for part in ("cert", "key"))
    if not certificate or not key:
        raise UserError(
            f"Dask's configuration has no {TLS}.cert and .key, which prove to the cluster who "
            "asks; set DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT and __KEY (docs/scaling.md)"
        )
    return Certificate(Path(certificate), Path(key))


def _connect(address: str) -> Client:
    """Connect to a scheduler, and log the wait for it; PassingError after CONNECT_SECONDS."""
    if address.startswith("tls:"):
        _certificate()
    waiting = Wait(f"the Dask scheduler at {address}", CONNECT_SECONDS)
    connect = partial(Client, address, timeout=CONNECT_SECONDS, set_as_default=False)
    client = call_in_thread("dask", connect)
    while not client.done():
        wait([client], waiting.until_next())
        waiting.speak()
    try:
        return client.result()
    except OSError as error:
        raise PassingError(
            f"no Dask scheduler answers at {address} ({error}); start it, or give its address as "
            "rollouts.cluster"
        ) from error


@contextmanager
def _local_cluster(batches: int) -> Iterator[LocalCluster]:
    """Start worker processes on this machine, which no other user can give work to.

    They may have children, as an agent's own process may.
    """
    workers = min(batches, usable_cores())
    with dask.config.set({"distributed.worker.daemon": False}):
        cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=math.ceil(batches / workers),
            processes=True,
            memory_limit=None,
            scheduler_kwargs={"dashboard": False, "dashboard_address": f"{LOOPBACK}:0"},
            security=Security.temporary(),
        )
        with closing(cluster):
            yield cluster
