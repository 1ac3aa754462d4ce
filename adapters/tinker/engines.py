"""Our own engine as a child process, which cannot outlive us: it ends when its stdin closes."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from adapters.children import keep_from_children
from adapters.errors import EngineDied, ServiceError

LOCAL = "local/"
LOG = "engine.log"
CLOSING_SECONDS = 5

_begun: dict[str, "Engine"] = {}
"""Base model → the engine that was begun for it and has no folder yet."""


@dataclass(frozen=True)
class Engine:
    """A child that serves the Tinker API, once it was told the folder it keeps its state in."""

    process: subprocess.Popen[bytes]
    key: str

    def open(self, state: Path) -> str:
        """The URL it serves at. Raises ServiceError if it does not start."""
        state.mkdir(parents=True, exist_ok=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{state}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and its log says why
        for line in self.process.stdout:
            name, _, value = line.decode().removeprefix("export ").strip().partition("=")
            if name == "TINKER_BASE_URL":
                return value
        raise ServiceError(f"the engine did not start: {_last_words(state)}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


def needs_engine(base_model: str) -> bool:
    """Whether no server is named that has the model: neither by URL nor, if hosted, by key."""
    if os.environ.get("TINKER_BASE_URL"):
        return False
    hosted = os.environ.get("TINKER_API_KEY") or os.environ.get("TINKER_CREDENTIAL_CMD")
    return base_model.startswith(LOCAL) or not hosted


@contextmanager
def engine_begun(base_model: str) -> Iterator[None]:
    """Let the engine that runs in this block load its libraries while we load ours.

    Does nothing where a server has the model.
    """
    if needs_engine(base_model):
        _begun[base_model] = _start(base_model)
    try:
        yield
    finally:
        if spare := _begun.pop(base_model, None):
            with spare.process:
                spare.close()


@contextmanager
def running_engine(base_model: str, state: Path) -> Iterator[tuple[str, str, Future[None], int]]:
    """URL, key, the news of its death, and process of an engine that ends with this block."""
    engine = _begun.pop(base_model, None) or _start(base_model)
    died: Future[None] = Future()
    with engine.process:
        try:
            url = engine.open(state)
            Thread(target=_watch, args=(engine.process, state, died), daemon=True).start()
            yield url, engine.key, died, engine.process.pid
        finally:
            died.cancel()
            engine.close()


def _start(base_model: str) -> Engine:
    key = f"tml-{secrets.token_hex(24)}"
    command = [sys.executable, "-m", "engine", "--base-model", base_model, "--port", "0"]
    command += ["--state", "-", "--exit-with-stdin"]
    if base_model.startswith(LOCAL):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # such an id is found in the cache alone
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TINKER_API_KEY": key},
        start_new_session=True,  # a Ctrl-C is ours to handle: we may still need to save
    )
    assert process.stdin is not None
    keep_from_children(process.stdin)
    return Engine(process, key)


def _watch(process: subprocess.Popen[bytes], state: Path, died: Future[None]) -> None:
    code = process.wait()
    if died.set_running_or_notify_cancel():
        died.set_exception(
            EngineDied(
                f"the engine (process {process.pid}) ended with code {code}: {_last_words(state)}. "
                f"Its log is {state / LOG}; start the same run again and it continues"
            )
        )


def _last_words(state: Path) -> str:
    log = state / LOG
    said = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
