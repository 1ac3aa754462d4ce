"""An object store on this machine, SeaweedFS's, and a line to it that delays, cuts and fails."""

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

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

    def objects(self) -> dict[str, bytes]:
        """Return every object, by its key."""
        store = self._client()
        keys = [one["path"] for page in store.list() for one in page]
        return {key: bytes(obstore.get(store, key).bytes()) for key in keys}

    def answers(self) -> bool:
        try:
            obstore.put(self._client(), "begun", b"")
        except obstore.exceptions.BaseError:
            return False
        return True

    def _client(self) -> S3Store:
        return S3Store(
            "team",
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id=KEYS["accessKey"],
            secret_access_key=KEYS["secretKey"],
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )


def variables_for(port: int) -> dict[str, str]:
    """Return the variables by which a program speaks to the store, or to a line to it."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """Run a store whose files are in a folder."""
    config, port = folder / "keys.json", free_port()
    actions = ["Admin", "Read", "Write", "List"]
    identity = {"name": "team", "credentials": [KEYS], "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.skip("SeaweedFS has no wheel for this system")
    command = [str(weed), "server", f"-dir={folder}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.port={port}"]
    command += [f"-s3.config={config}", "-volume.max=20", *(f"-{name}" for name in OFF)]
    command += [f"-{name}={free_port()}" for name in PORTS]
    with (folder / "weed.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            up = ObjectStore(port).answers
            wait_until("the object store answers", lambda: server.poll() is not None or up())
            yield ObjectStore(port)
        finally:
            server.kill()
            server.wait()


@dataclass
class Line:
    """A TCP line to a port of this machine; what it does to connections is changed at any time."""

    target: int
    delay: float = 0
    """Seconds that each byte takes in each direction."""
    is_down: bool = False
    cuts: int = 0
    """Connections that are still to be cut, after `cut_after` bytes of a request."""
    cut_after: int = 0
    loses: bytes = b""
    """Word of a request whose answer is lost, once."""
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._join, args=[client], daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        if self.is_down:
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self.target))
        ways = [(client, server, True), (server, client, False)]
        for way in ways:
            threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        due: queue.Queue[tuple[float, bytes]] = queue.Queue()
        threading.Thread(target=self._send, args=[due, target, source], daemon=True).start()
        carried = 0
        with suppress(OSError):
            while data := source.recv(2**16):
                carried += len(data)
                if self.is_down:
                    break
                if asks and self.cuts and carried > self.cut_after:
                    self.cuts -= 1
                    break
                if asks and self.loses and self.loses in data:
                    self.loses = b""
                    target.sendall(data)
                    time.sleep(0.5)  # it acts on the request
                    break
                due.put((time.monotonic() + self.delay, data))
        due.put((0, b""))

    def _send(self, due: "queue.Queue", target: socket.socket, source: socket.socket) -> None:
        with suppress(OSError):
            while (item := due.get())[1]:
                time.sleep(max(item[0] - time.monotonic(), 0))
                target.sendall(item[1])
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def line_to(store: ObjectStore) -> Iterator[Line]:
    line = Line(store.port)
    threading.Thread(target=line.serve, daemon=True).start()
    try:
        yield line
    finally:
        line.listener.close()
