"""An object store on this machine, SeaweedFS's, and a line to it that delays, cuts and fails."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.store import S3Store

from tests.support.processes import free_port, wait_until

KEYS = {"accessKey": "AKIDSTORE", "secretKey": "planted-secret-of-the-store"}
PORTS = ("s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
PORTS += ("filer.port", "filer.port.grpc")
OFF = ("s3.port.iceberg=0", "s3.port.lance=0", "master.telemetry=false")


@dataclass
class ObjectStore:
    """A server of S3's API with one bucket, `team`."""

    port: int
    url: str = ""
    """Its address, on loopback by default."""

    def objects(self) -> dict[str, bytes]:
        """Return every object, by its key."""
        keys = [one["path"] for page in self._client().list() for one in page]
        return {key: bytes(obstore.get(self._client(), key).bytes()) for key in keys}

    def answers(self) -> bool:
        with suppress(obstore.exceptions.BaseError):
            obstore.put(self._client(), "begun", b"")
            return True
        return False

    def _client(self) -> S3Store:
        given: Any = {"access_key_id": KEYS["accessKey"], "secret_access_key": KEYS["secretKey"]}
        given |= {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
        return S3Store("team", endpoint=self.url or f"http://127.0.0.1:{self.port}", **given)


def variables_for(port: int) -> dict[str, str]:
    """Return the variables by which a program speaks to the store, or to a line to it."""
    key = {"AWS_ACCESS_KEY_ID": KEYS["accessKey"], "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"]}
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1", **key}


@contextmanager
def object_store(folder: Path, *options: str, url: str = "") -> Iterator[ObjectStore]:
    """Run a store whose files are in a folder, on loopback, or by its `options` at a URL."""
    store, weed = ObjectStore(urlsplit(url).port or free_port(), url), find_weed()
    if not weed.exists():
        pytest.skip("SeaweedFS has no wheel for this system")
    config, actions = folder / "keys.json", ["Admin", "Read", "Write", "List"]
    identity = {"name": "team", "credentials": [KEYS], "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    command = [str(weed), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-s3.port={store.port}", f"-s3.config={config}", "-volume.max=20", *options]
    command += [f"-{name}={free_port()}" for name in PORTS] + [f"-{name}" for name in OFF]
    with (folder / "weed.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(
                "the object store answers", lambda: server.poll() is not None or store.answers()
            )
            yield store
        finally:
            server.kill()
            server.wait()


def find_weed() -> Path:
    """Return the program of SeaweedFS, which may not be there."""
    return Path(sys.executable).with_name("weed")


@dataclass
class Line:
    """A TCP line to a port of this machine; what it does to connections is changed at any time.

    It cuts `cuts` connections after `cut_after` bytes of requests, and loses the answer of a
    request that begins with `loses`.
    """

    target: int
    port: int = field(default_factory=free_port)
    delay: float = 0
    """Seconds that each byte takes in each direction."""
    is_down: bool = False
    cuts: int = 0
    cut_after: int = 0
    loses: bytes = b""
    askers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self) -> None:
        await asyncio.start_server(self._join, "127.0.0.1", self.port)

    async def end(self) -> None:
        """Close what is open, and wait for the ends of all that carries."""
        for writer in self.askers:
            writer.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=5)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.close()
            return
        back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        self.askers.append(writer)
        await asyncio.gather(self._carry(reader, forth, writer), self._carry(back, writer))

    async def _carry(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        asker: asyncio.StreamWriter | None = None,
    ) -> None:
        loop, carried = asyncio.get_running_loop(), 0
        with suppress(OSError):
            while (data := await source.read(2**16)) and not self.is_down:
                carried += len(data)
                if asker and self.cuts and carried > self.cut_after:
                    self.cuts -= 1
                    asker.transport.abort()
                    break
                if asker and self.loses and data.startswith(self.loses):
                    self.loses = b""
                    asker.transport.abort()  # the store acts on it
                loop.call_later(self.delay, target.write, data)
        loop.call_later(self.delay, target.close)


@contextmanager
def line_to(store: ObjectStore) -> Iterator[Line]:
    line, loop = Line(store.port), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(line.serve(), loop).result()
    try:
        yield line
    finally:
        asyncio.run_coroutine_threadsafe(line.end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
