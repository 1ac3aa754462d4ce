"""The libraries of clients: silent, with models built before their use, and one TLS context."""

import asyncio
import importlib
import importlib.util
import os
import ssl
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.adapters.clients.libraries import (
    TELEMETRY,
    SharedContext,
    release_closed,
    share_contexts,
    when_imported,
)
from ratchet.adapters.door.door import Door
from ratchet.adapters.network.addresses import Certificate, Listener
from ratchet.adapters.network.app_server import AppServer
from ratchet.adapters.rewards import Reward
from tests.adapters.harness.test_player import play
from tests.support.door.garbage import no_collector
from tests.support.door.opened_door import ASK
from tests.support.processes import ROOT


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a package that has not been imported, and return its name."""
    name = f"package_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return name


def test_the_function_is_called_once_after_the_import(package: str) -> None:
    values: list[int] = []
    before = [*sys.meta_path]
    when_imported(package, lambda module: values.append(module.value))
    assert importlib.util.find_spec(package), "to look for it is not to import it"
    assert values == []
    importlib.reload(importlib.import_module(package))
    assert (values, sys.meta_path) == ([1], before)


def test_several_functions_can_wait_for_the_same_package(package: str) -> None:
    done: list[str] = []
    for who in ("first", "second"):
        when_imported(package, lambda _, who=who: done.append(who))
    importlib.import_module(package)
    assert sorted(done) == ["first", "second"]


def test_the_function_is_called_at_once_if_the_package_is_imported() -> None:
    done: list[str] = []
    when_imported("sys", lambda _: done.append("sys"))
    assert done == ["sys"]


SCRIPT = (
    "import ratchet.flows, os, sys; "
    "print('prefect' in sys.modules, *(os.environ[n] for n in {names}))"
)


def test_the_flows_turn_telemetry_off_before_prefect_is_imported() -> None:
    environment = {name: text for name, text in os.environ.items() if name not in TELEMETRY}
    environment |= {"PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "0"}
    command = [sys.executable, "-c", SCRIPT.format(names=[*TELEMETRY])]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", *({**TELEMETRY, "DO_NOT_TRACK": "0"}).values()]


TORCH_LATER = """
import ratchet.flows, sys, tinker
from transformers import AutoTokenizer
print("torch" in sys.modules)
values = tinker.TensorData([1.0], dtype="float32").to_torch()
import torch
print(values.dtype is torch.float32, tinker.TensorData.from_torch(values).data)
"""


def test_the_sdk_and_tokenizers_import_torch_when_they_use_it() -> None:
    ran = subprocess.run([sys.executable, "-c", TORCH_LATER], capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["False", "True [1.0]"], ran.stderr


FIRST_USE = """
import sys, threading
{before}
import openai
{after}
sys.setswitchinterval(1e-6)
models = openai.BaseModel.__subclasses__()[:150]
together, failed = threading.Barrier(8), []

def use():
    for model in models:
        together.wait()
        try:
            model.__pydantic_validator__.validate_python
        except Exception as error:
            failed.append(error)

threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(failed), sum(not model.__pydantic_complete__ for model in models))
"""
LOCK = "from ratchet.adapters.clients.libraries import lock_client_models; lock_client_models()"


def first_use(before: str = "", after: str = "") -> list[int]:
    """Use models in eight threads; return how many uses failed, and the models not yet built."""
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USE.format(before=before, after=after)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in ran.stdout.split()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_thread_meets_a_model_of_openai_s_client_that_is_being_built(when: str) -> None:
    assert first_use(**{when: LOCK}) == [0, 0]


NOWHERE: Any = {"base_url": "http://127.0.0.1:1/v1", "api_key": "key"}


async def asks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Make a client as everybody does."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model=model, messages=ASK)
    return 1.0


def asks_anthropic(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
        client.messages.create(model=model, messages=ASK, max_tokens=8)
    return 1.0


def ask_async(transport: httpx.MockTransport) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://door")

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "ask", [ask_async, lambda transport: httpx.Client(transport=transport).get("http://door")]
)
def test_a_read_response_of_httpx_leaves_memory_without_the_garbage_collector(
    ask: Callable[[httpx.MockTransport], httpx.Response],
) -> None:
    release_closed()
    said = httpx.ByteStream(b"said")
    response = ask(httpx.MockTransport(lambda _: httpx.Response(200, stream=said)))
    assert response.content == b"said"
    assert response.elapsed.total_seconds() > 0
    left = weakref.ref(response)
    with no_collector():
        del response
        assert left() is None


@pytest.mark.parametrize("library", [openai.OpenAI, anthropic.Anthropic])
def test_a_closed_client_leaves_memory_without_the_garbage_collector(library: type[Any]) -> None:
    release_closed()
    with no_collector():
        with library(**NOWHERE) as client:
            assert getattr(client, "chat", client.models)._client is client
        left = weakref.ref(client)
        del client
        assert left() is None


def test_a_closed_client_of_an_event_loop_leaves_memory_too() -> None:
    release_closed()

    async def close() -> weakref.ref[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(**NOWHERE) as client:
            assert client.chat.completions._client is client
        return weakref.ref(client)

    with no_collector():
        assert asyncio.run(close())() is None


@pytest.fixture
def readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """List the readings of a certificate file that no client has read before."""
    share_contexts()
    read, load = list[object](), ssl.SSLContext.load_verify_locations

    def load_and_tell(context: ssl.SSLContext, *args: Any, **files: Any) -> None:
        read.append((args, files))
        load(context, *args, **files)

    certify(tmp_path, "ca")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load_and_tell)
    return read


def certify(folder: Path, name: str) -> Certificate:
    """Write a certificate of 127.0.0.1 that is its own authority."""
    pem, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    words += ["-pkeyopt", "ec_paramgen_curve:P-256"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    written = ["-keyout", str(key), "-out", str(pem)]
    subprocess.run([*words, *names, *written], check=True, capture_output=True)
    return Certificate(pem, key)


def context_of(client: Any) -> ssl.SSLContext:
    return client._transport._pool._ssl_context


@pytest.mark.parametrize("agent", [asks, asks_anthropic])
def test_a_batch_reads_the_certificates_once_whoever_makes_its_clients(
    open_door: Door, readings: list[object], agent: Callable[..., Any]
) -> None:
    ends = play(open_door, agent, [{}] * 6)
    assert [end.outcome for end in ends] == [Reward(1.0)] * 6
    assert len(readings) == 1


def test_other_certificates_in_the_environment_are_read(
    readings: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client() as one, httpx.Client() as two:
        assert context_of(one) is context_of(two)
    monkeypatch.setenv("SSL_CERT_FILE", str(certify(tmp_path, "other").certificate))
    with httpx.Client() as other, httpx.Client(trust_env=False) as untrusting:
        assert len({*map(id, map(context_of, (one, other, untrusting)))}) == 3
    certify(tmp_path, "other")
    with httpx.Client() as again:
        assert context_of(again) is not context_of(other)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(FileNotFoundError):
        httpx.Client()


@pytest.mark.parametrize(
    "change",
    [
        lambda context: context.load_verify_locations("own.pem"),
        lambda context: context.load_cert_chain("own.pem"),
        lambda context: context.set_ciphers("ALL"),
        lambda context: context.set_alpn_protocols(["h2"]),
        lambda context: setattr(context, "check_hostname", False),
        lambda context: setattr(context, "verify_mode", ssl.CERT_NONE),
        lambda context: setattr(context, "keylog_filename", "keys"),
    ],
)
def test_no_client_can_change_what_it_shares(change: Callable[[Any], object]) -> None:
    share_contexts()
    with openai.OpenAI(**NOWHERE) as client:
        context = context_of(client._client)
    assert isinstance(context, SharedContext)
    with pytest.raises(AttributeError, match="give the client its own"):
        change(context)
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)


def test_what_a_client_gives_or_asks_for_is_its_own() -> None:
    share_contexts()
    given = httpx.create_ssl_context()
    with httpx.Client(verify=given) as one, httpx.Client(verify=False) as two:
        assert context_of(one) is given
        assert context_of(two).verify_mode == ssl.CERT_NONE
    assert httpx.create_ssl_context() is not given
    transports = (
        httpx.HTTPTransport(True),
        httpx.HTTPTransport(http2=True),
        httpx.HTTPTransport(http2=True),
    )
    contexts: Any = [transport._pool._ssl_context for transport in transports]
    assert type(contexts[0]) is ssl.SSLContext
    with httpx.Client() as plain:
        assert context_of(plain) is not contexts[1] is contexts[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AppServer]:
    """Serve "yes" by TLS, with the certificate `server.pem`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"yes"})

    serving = AppServer(app, Listener(tls=certify(tmp_path, "server")))
    serving.start()
    yield serving
    serving.stop()


def test_clients_of_many_threads_check_a_server_s_certificate(
    server: AppServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_contexts()

    async def ask() -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(server.url)).text

    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    with ThreadPoolExecutor(8) as threads:
        said = [*threads.map(lambda _: httpx.get(server.url).text, range(32))]
        said += threads.map(lambda _: asyncio.run(ask()), range(32))
    assert said == ["yes"] * 64
    monkeypatch.setenv("SSL_CERT_FILE", str(certify(tmp_path, "another").certificate))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url)
