"""Answers of servers that are strangers, as clients of theirs and the SDK get them."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import pytest

from ratchet.adapters.clients.scoring_server import CannotScore, ScoringServer, speaks_openai
from ratchet.adapters.errors import ServiceError, UserError
from ratchet.adapters.network import answers
from ratchet.adapters.network.answers import ask, said_instead
from ratchet.adapters.process.clock import running_clock
from ratchet.adapters.redaction import LONGEST_SAID
from ratchet.adapters.tinker.bridges import ask_wire
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import open_session
from tests.support.servers.hostile_server import (
    NO_END,
    SHAPES,
    HostileServer,
    dripping,
    hostile,
    saying,
)

KEY = "tml-0123456789abcdef0123456789abcdef"
WITH_KEYS = {"x-api-key": KEY, "authorization": f"Bearer {KEY}"}
MIB = 2**20


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bounds small."""
    monkeypatch.setattr(answers, "ANSWERING_SECONDS", 1.0)
    monkeypatch.setattr(answers, "REFUSING_SECONDS", 0.5)
    monkeypatch.setattr(answers, "LARGEST_ANSWER", 8 * MIB)
    for name in ("TINKER_API_KEY", "RATCHET_TEACHER_KEY"):
        monkeypatch.setenv(name, KEY)


@pytest.fixture
def other() -> Iterator[HostileServer]:
    with hostile(saying(b"{}")) as served:
        yield served


@pytest.mark.parametrize("name", NO_END)
def test_an_answer_out_of_bounds_ends_in_time_and_memory(name: str, other: HostileServer) -> None:
    with hostile(NO_END[name]) as server:
        server.elsewhere = f"{other.url}/x"
        began = running_clock().seconds()
        tracemalloc.start()
        answer = ask("POST", f"{server.url}/a", 30, headers=WITH_KEYS, json={})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert running_clock().seconds() - began < 10
        assert peak < 40 * MIB
        assert answer.is_error
        assert len(answer.content) <= answers.LARGEST_ERROR
        assert bool(said_instead(answer)) == ("refusal" not in name)
        assert len(server.asked) <= answers.MOST_REDIRECTS
    assert other.asked == []


def test_a_head_that_has_no_end_ends_as_one_that_never_comes() -> None:
    never = httpx.Timeout(1, write=1e6)
    with hostile(dripping) as server, pytest.raises(httpx.ReadTimeout):
        ask("POST", f"{server.url}/a", never, json={})


def test_a_transport_that_tells_nothing_of_a_request_bounds_a_head_as_well() -> None:
    class Silent(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            del request.extensions["trace"]
            return await super().handle_async_request(request)

    async def asking(url: str) -> None:
        timeout = httpx.Timeout(1, write=1e6)
        async with httpx.AsyncClient(transport=Silent(), timeout=timeout) as client:
            await answers.send_bounded(client, client.build_request("POST", url, json={}))

    with hostile(dripping) as server, pytest.raises(httpx.ReadTimeout):
        asyncio.run(asking(server.url))


def test_a_redirect_is_followed_on_the_same_server_alone(other: HostileServer) -> None:
    more = "location: /b\r\n"
    with hostile(saying(b"", "307 Temporary Redirect", more=more)) as server:
        ask("POST", f"{server.url}/a", 30, headers=WITH_KEYS, json={})
        assert [one["x-api-key"] for one in server.asked] == [KEY] * answers.MOST_REDIRECTS
        server.asked.clear()
        server.answer, server.elsewhere = NO_END["a redirect elsewhere"], other.url
        refused = said_instead(ask("GET", f"{server.url}/a", 30, headers=WITH_KEYS))
        assert f"a redirect to {other.url}, which gets no key" in refused
    assert other.asked == []


@pytest.mark.parametrize("name", [*NO_END, "", "[]", "null", "{}", "deep", "HTML", "its keys"])
def test_no_answer_to_the_sdk_is_a_trace_a_long_wait_or_a_shown_key(
    name: str, other: HostileServer, caplog: pytest.LogCaptureFixture
) -> None:
    answer = {**NO_END, **SHAPES}[name]
    with hostile(answer) as server:
        server.elsewhere = f"{other.url}/x"
        at = TinkerServer(server.url, KEY, Future(), None)
        began = running_clock().seconds()
        with open_session(at, 3.0) as service:
            with pytest.raises(ServiceError) as told:
                service.context("a/model")
            with pytest.raises(ServiceError):
                service.sampler("tinker://a:train:0/sampler_weights/b")
        assert running_clock().seconds() - began < 30
    assert len(str(told.value)) < LONGEST_SAID + 400
    assert "\n" not in str(told.value)
    assert KEY not in f"{told.value}{caplog.text}"
    assert other.asked == []


@pytest.mark.parametrize("name", [*NO_END, *SHAPES])
def test_no_answer_to_a_teacher_s_question_is_a_trace_or_shows_a_key(
    name: str, other: HostileServer
) -> None:
    with hostile({**NO_END, **SHAPES}[name]) as server:
        server.elsewhere = f"{other.url}/x"
        with pytest.raises(UserError) as told:
            ScoringServer(f"{server.url}/v1#m", 30).check(1)
        assert KEY not in str(told.value)
        if name in NO_END and "refusal" not in name:
            with pytest.raises(CannotScore, match="cannot be asked: the server gives"):
                speaks_openai(server.url)
            with pytest.raises(ServiceError, match="cannot be asked: the server gives"):
                ask_wire(server.url, KEY)
    assert other.asked == []
