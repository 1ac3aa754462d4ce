"""The TLS contexts of agents' clients: read once for a process, and changed by nobody."""

import asyncio
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from adapters.clients.libraries import SharedContext, share_contexts
from adapters.door.door import Door
from adapters.network.addresses import Certificate, Listener
from adapters.network.app_server import AppServer
from adapters.rewards import Reward
from tests.adapters.harness.test_player import play
from tests.support.door.opened_door import ASK

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
    for transport in (httpx.HTTPTransport(http2=True), httpx.HTTPTransport(True)):
        assert type(transport._pool._ssl_context) is ssl.SSLContext  # pyright: ignore


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
