"""A server with a fault is found out by what it answers, and nothing else is said of it."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from ratchet.adapters.diagnosis import examination
from ratchet.adapters.diagnosis.bench import Finding
from ratchet.adapters.diagnosis.examination import SERVICE_PROBES, TITLES, Diagnosis, examine
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import Service, open_session
from tests.support.servers.engine_server import TINY, Address, serving
from tests.support.servers.poor_servers import FAULTS, Fault, poor_server

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
ALSO = "models"
"""What every server here offers."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time."""
    monkeypatch.setattr(examination, "MOST_SECONDS", 600.0)
    monkeypatch.setattr(examination, "PATIENCE_WITH_PROBE", 60.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(TINY, tmp_path_factory.mktemp("engine")) as address:
        yield address


@contextmanager
def service_at(url: str, engine: Address) -> Iterator[Service]:
    server = TinkerServer(url, engine.key, Future(), None)
    with open_session(server, patience=60) as service:
        yield service


def examined(engine: Address, fault: Fault, names: set[str] | None = None) -> Diagnosis:
    with poor_server(engine.url, fault) as poor, service_at(poor.url, engine) as service:
        return examine(service, engine.base_model, names)


def test_an_engine_offers_all_that_is_probed_in_few_tokens(engine: Address) -> None:
    with service_at(engine.url, engine) as service:
        made = examine(service, engine.base_model)
    assert {one.name: one.verdict for one in made.findings if one.verdict != "offers"} == {}
    named = {name for names in SERVICE_PROBES for name in names}
    assert {one.name for one in made.findings} == named
    assert named == TITLES.keys()
    assert made.tokens <= 600


def test_what_is_asked_for_first_is_probed_first_and_the_table_stays_as_it_is(
    engine: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def make(_: object, named: tuple[str, ...], *__: object) -> list[Finding]:
        asked.extend(named)
        return [Finding(name, "offers", "", "") for name in named]

    monkeypatch.setattr(examination, "_make", make)
    with service_at(engine.url, engine) as service:
        made = examine(service, engine.base_model, first={"ttl", "no_moments"})
    named = [name for names in SERVICE_PROBES for name in names]
    first = ["state", "no_moments", "optimizer", "ttl"]
    assert asked == [*first, *(name for name in named if name not in first)]
    assert [one.name for one in made.findings] == named


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_found_out(fault: str, engine: Address) -> None:
    made = examined(engine, FAULTS[fault], {*FOUND[fault], ALSO})
    assert len(made.findings) >= len(FOUND[fault]) + 1
    found = {one.name: one.verdict for one in made.findings if one.verdict != "offers"}
    assert found == FOUND[fault]
