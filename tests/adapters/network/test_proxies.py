"""Proxies of the environment: no client reaches this machine by one."""

import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import (
    check_listener,
    check_proxies,
    exempt_loopback,
    spare_loopback,
)
from ratchet.adapters.process.program import program_environment
from tests.support.processes import ROOT

LOOPBACK = "127.0.0.1,localhost,::1"

CLIENTS = """
import asyncio, sys, urllib.request
import ratchet.flows
import aiohttp, httpx, openai, requests
from prefect.client.orchestration import PrefectHttpxSyncClient

url = sys.argv[1]

async def ask():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
        return await answer.text()

with openai.OpenAI(base_url=url, api_key="x") as client, PrefectHttpxSyncClient() as prefect:
    answers = [
        httpx.get(url).text, requests.get(url).text, urllib.request.urlopen(url).read().decode(),
        asyncio.run(ask()), client.get("", cast_to=str), prefect.get(url).text,
    ]
assert answers == ["here"] * 6, answers
"""


class _Here(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every proxy from the environment; what a test sets is forgotten after it."""
    for name in {*os.environ, "no_proxy", "NO_PROXY"}:
        if name.lower().endswith("_proxy"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("without_proxies")
def test_no_client_reaches_this_machine_by_a_proxy_that_hangs() -> None:
    with HTTPServer(("127.0.0.1", 0), _Here) as here, socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        proxy = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        Thread(target=here.serve_forever, daemon=True).start()
        names = ("HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "http_proxy")
        asked = subprocess.run(
            [sys.executable, "-c", CLIENTS, f"http://127.0.0.1:{here.server_port}"],
            env={**os.environ, **dict.fromkeys(names, proxy)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        here.shutdown()
    assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({}, "linux", {"no_proxy": LOOPBACK, "NO_PROXY": LOOPBACK}),
        ({"NO_PROXY": "*"}, "linux", {"no_proxy": "*", "NO_PROXY": "*"}),
        (
            {"NO_PROXY": "a.org, localhost"},
            "linux",
            dict.fromkeys(("no_proxy", "NO_PROXY"), "a.org,localhost,127.0.0.1,::1"),
        ),
        (
            {"NO_PROXY": "a.org", "no_proxy": "b.org"},
            "linux",
            {"NO_PROXY": f"a.org,{LOOPBACK}", "no_proxy": f"b.org,{LOOPBACK}"},
        ),
        (
            {"NO_PROXY": "*,a.org"},
            "linux",
            dict.fromkeys(("no_proxy", "NO_PROXY"), f"*,a.org,{LOOPBACK}"),
        ),
        (
            {"NO_PROXY": "a.org", "no_proxy": ""},
            "linux",
            {"NO_PROXY": f"a.org,{LOOPBACK}", "no_proxy": LOOPBACK},
        ),
        ({}, "darwin", {}),
        ({"http_proxy": "http://p"}, "darwin", {"no_proxy": LOOPBACK, "NO_PROXY": LOOPBACK}),
    ],
)
def test_loopback_is_added_to_the_hosts_that_the_user_names(
    variables: dict[str, str], platform: str, expected: dict[str, str]
) -> None:
    added = exempt_loopback(variables, platform)
    assert added == expected
    assert exempt_loopback({**variables, **added}, platform) == added, "it is added once"


@pytest.mark.usefixtures("without_proxies")
def test_an_agent_s_program_is_told_which_hosts_have_no_proxy() -> None:
    spare_loopback()
    assert program_environment()["NO_PROXY"] == program_environment()["no_proxy"] == LOOPBACK


@pytest.mark.usefixtures("without_proxies")
def test_a_host_behind_a_proxy_of_all_schemes_is_not_asked_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = "https://nowhere.invalid", "that server", "start it"
    with pytest.raises(UserError, match=r"^that server cannot be reached \(.*\); start it$"):
        check_listener(*asked)
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    check_listener(*asked)  # only the proxy can find it


@pytest.mark.usefixtures("without_proxies")
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("ALL_PROXY", "socks5://me:secret@host:1080", "install that"),
        ("all_proxy", "socks4://me:secret@host:1080", "http://host:port"),
        ("HTTPS_PROXY", "http://me:secret@host:port", "http://host:port"),
        ("HTTP_PROXY", "http://me:se/cret@host:80", "http://host:port"),
        ("NO_PROXY", "fd00::/8", "without a range"),
        ("NO_PROXY", "a.org,[::1]", "without brackets"),
    ],
)
def test_a_proxy_that_the_http_client_cannot_read_is_refused_by_its_variable(
    name: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=remedy) as refused:
        check_proxies()
    assert name in str(refused.value)
    assert "cret" not in str(refused.value)
