"""A server with a fault is found out by what it answers, and nothing else is said of it."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from ratchet.adapters.diagnosis.probes import SERVICE_PROBES, TITLES, examine
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import Service, open_session
from tests.support.servers.engine_server import TINY, Address, serving
from tests.support.servers.poor_servers import FAULTS, poor_server

FOUND: dict[str, dict[str, str]] = {
    "ignores seeds": {"seeds": "LIES"},
    "ignores grad_clip_norm": {"grad_clip": "LIES"},
    "flattens tables of targets": {"targets": "LIES"},
    "ignores the settings of losses": {"clip": "LIES"},
    "loads no optimizer": {"optimizer": "LIES"},
    "always loads the optimizer": {"no_moments": "LIES"},
    "scores no prompts": {"prompt_logprobs": "lacks", "likeliest": "lacks"},
    "rounds log-probabilities to bfloat16": {"logprobs": "lacks", "company": "lacks"},
    "ignores ttl_seconds": {"ttl": "LIES"},
    "takes the end of a session and keeps its clients": {"session_end": "LIES"},
    "knows no end of a session": {"session_end": "lacks"},
    "names no sampled sequences": {"wire": "lacks"},
    "forgets weights with their session": {"outlives": "lacks"},
}
"""Fault → what is found, by name."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(TINY, tmp_path_factory.mktemp("engine")) as address:
        yield address


@contextmanager
def service_at(url: str, engine: Address) -> Iterator[Service]:
    server = TinkerServer(url, engine.key, Future(), None)
    with open_session(server, patience=60) as service:
        yield service


def test_an_engine_offers_all_that_is_probed_in_few_tokens(engine: Address) -> None:
    with service_at(engine.url, engine) as service:
        made = examine(service, engine.base_model)
    assert {one.name: one.verdict for one in made.findings if one.verdict != "offers"} == {}
    named = {name for names in SERVICE_PROBES for name in names}
    assert {one.name for one in made.findings} == named
    assert named == TITLES.keys()
    assert made.tokens <= 600


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_found_out(fault: str, engine: Address) -> None:
    with poor_server(engine.url, FAULTS[fault]) as poor, service_at(poor.url, engine) as service:
        made = examine(service, engine.base_model, FOUND[fault])
    assert {one.name: one.verdict for one in made.findings} == FOUND[fault]
