"""A Tinker service by URL: the hosted one, this machine's engine, or any server of the API."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, ParamSpec, TypeVar, cast

import tinker
from renderers.base import Tokenizer
from tinker.types import RequestErrorCategory

from adapters.errors import UserError

LOCAL = "local/"
CLOSING_SECONDS = 5
WATCH_SECONDS = 0.5

P = ParamSpec("P")
T = TypeVar("T")


class ServiceError(UserError):
    """The Tinker service cannot be used, for a reason its user can mend."""


class EngineDied(ServiceError):
    """The engine's process ended while it was needed."""


PASSING = (tinker.APIConnectionError, tinker.InternalServerError, tinker.RateLimitError)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later: the fault is the network's or the service's."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category is not RequestErrorCategory.User
    return isinstance(error, PASSING)


@dataclass(frozen=True)
class Service:
    """A Tinker service and, if it is the engine of this run, the news of its death.

    The SDK keeps asking a dead address for five minutes. Whatever waits on the service
    waits here, and learns of a dead engine at once.
    """

    client: tinker.ServiceClient
    rest: tinker.RestClient
    died: Future[None]
    calls: ThreadPoolExecutor
    engine: int | None
    """The process of our own engine."""

    def result(self, future: tinker.APIFuture[T]) -> T:
        """The result of a submitted operation."""
        return self._first(future.future())

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that blocks on the service."""
        return self._first(self.calls.submit(function, *args, **kwargs))

    def tokenizer(self, model_path: str) -> Tokenizer:
        """The tokenizer of the model behind saved sampler weights."""
        client = self.result(self.client.create_sampling_client(model_path=model_path))
        return cast(Tokenizer, self.call(client.get_tokenizer))

    def context(self, base_model: str) -> int | None:
        """The most tokens a prompt and its answer may have, where the service says it."""
        capabilities = self.result(self.rest.get_server_capabilities())
        named = (m for m in capabilities.supported_models if m.model_name == base_model)
        return next((model.max_context_length for model in named), None)

    def check(self) -> None:
        """Raise EngineDied if the engine has."""
        if self.died.done():
            self.died.result()

    async def while_alive(self, work: Awaitable[T]) -> T:
        """What `work` comes to; if the engine dies first, EngineDied, and `work` is cancelled."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.check()
                await asyncio.wait([task], timeout=WATCH_SECONDS)
        finally:
            task.cancel()
        return task.result()

    def _first(self, future: Future[T]) -> T:
        either: list[Future[Any]] = [future, self.died]
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            self.check()
        return future.result()


@contextmanager
def connect(base_model: str, state: Path) -> Iterator[Service]:
    """A service that has `base_model`.

    TINKER_BASE_URL names a server. Without it a Tinker key means the hosted service, and no key,
    or a model only the engine has, means an engine of our own that keeps its state in `state`
    and ends with this block.
    """
    key = os.environ.get("TINKER_API_KEY")
    check_key(key)
    url = os.environ.get("TINKER_BASE_URL")
    hosted = key or os.environ.get("TINKER_CREDENTIAL_CMD")
    if url or (hosted and not base_model.startswith(LOCAL)):
        with _opened(url, key, Future(), None) as service:
            yield service
        return
    with _engine(base_model, state) as engine, _opened(*engine) as service:
        yield service


def check_key(key: str | None) -> None:
    """Refuse a key that the SDK would refuse, before anything starts. The key is not shown."""
    if key and not key.startswith(("tml-", "eyJ")):
        raise ServiceError(
            f"TINKER_API_KEY ({len(key)} characters) is not a Tinker key: one starts with 'tml-'. "
            "Set the right key, or unset it to run on the engine of this machine"
        )


@contextmanager
def _opened(
    url: str | None, key: str | None, died: Future[None], engine: int | None
) -> Iterator[Service]:
    client = tinker.ServiceClient(base_url=url, api_key=key)
    rest = tinker.RestClient(base_url=url, api_key=key)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="tinker") as calls:
        service = Service(client, rest, died, calls, engine)
        yield service
        if not died.done():
            service.call(client.close("success").result, CLOSING_SECONDS)


@contextmanager
def _engine(base_model: str, state: Path) -> Iterator[tuple[str, str, Future[None], int]]:
    """Start the engine as a child process that cannot outlive us: it ends when its stdin closes."""
    state.mkdir(parents=True, exist_ok=True)
    log = state / "engine.log"
    key = f"tml-{secrets.token_hex(24)}"
    command = [sys.executable, "-m", "engine", "--base-model", base_model, "--port", "0"]
    command += ["--state", str(state), "--exit-with-stdin"]
    if base_model.startswith(LOCAL):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # such an id is found in the cache alone
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "TINKER_API_KEY": key},
            start_new_session=True,  # a Ctrl-C is ours to handle: we may still need to save
        ) as process,
    ):
        died: Future[None] = Future()
        Thread(target=_watch, args=(process, log, died), daemon=True).start()
        try:
            yield _address(process, log), key, died, process.pid
        finally:
            died.cancel()
            _stop(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL in the line the engine prints once it answers."""
    assert process.stdout is not None
    for line in process.stdout:
        name, _, value = line.decode().removeprefix("export ").strip().partition("=")
        if name == "TINKER_BASE_URL":
            return value
    raise ServiceError(f"the engine did not start: {_last_words(log)}")


def _watch(process: subprocess.Popen[bytes], log: Path, died: Future[None]) -> None:
    code = process.wait()
    if died.set_running_or_notify_cancel():
        died.set_exception(
            EngineDied(
                f"the engine (process {process.pid}) ended with code {code}: {_last_words(log)}. "
                f"Its log is {log}; start the same run again and it continues"
            )
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
