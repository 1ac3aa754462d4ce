"""OpenTelemetry: a span a call by the conventions, and no message unless it is asked for."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from adapters.tracking.tracker import TrackedRun
from tasks.settings.run import Tracking
from tasks.tracking.run_tracking import RunTracking, tracker_openers
from tests.support.runs.tracked_run import GrowingRun

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Collector(ThreadingHTTPServer):
    """A collector of OTLP, which keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services = set[str]()
        super().__init__(("127.0.0.1", 0), _Taker)


class _Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= set(named(sent.resource.attributes)["service.name"].split())
            self.server.spans += [span for scope in sent.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        yield server
        server.shutdown()


def named(attributes: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        found = getattr(of, kind)
        return [value(item) for item in found.values] if kind == "array_value" else found

    return {one.key: value(one.value) for one in attributes}


def export(run: GrowingRun, what: Any, steps: int = 1) -> None:
    tracked = TrackedRun("fox", "0a1b2c", {}, run.folder.tracking, run.folder.path.parent)
    [opener] = tracker_openers(Tracking(opentelemetry=what)).values()
    with RunTracking(run.folder, {"OpenTelemetry": partial(opener, tracked)}, steps, 0) as tracking:
        tracking.follow()


def test_each_call_is_a_span_of_its_rollout_and_is_sent_once(
    tmp_path: Path, collector: Collector
) -> None:
    run = GrowingRun(tmp_path / "fox")
    run.step(0)
    export(run, "calls")
    export(run, "calls")  # opened again
    chats = [span for span in collector.spans if span.name == "chat policy"]
    wholes = {span.span_id: span for span in collector.spans if span.name == "invoke_agent"}
    assert (len(chats), len(wholes), len(collector.spans)) == (2, 2, 4)
    attributes = named(chats[0].attributes)
    assert (
        attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "ratchet",
            "gen_ai.request.model": "policy",
            "gen_ai.response.model": "00000",
            "gen_ai.usage.input_tokens": 11,
            "gen_ai.usage.output_tokens": 5,
            "ratchet.run": "fox",
            "ratchet.step": 0,
            "ratchet.rollout": "train-00000-0000-00",
        }.items()
    )
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    for chat in chats:
        assert wholes[chat.parent_span_id].trace_id == chat.trace_id
    assert collector.services == {"ratchet"}
    assert [span.status.message for span in wholes.values() if span.status.code] == [
        "ValueError: no answer"
    ]
    assert b"Who are you?" not in b"".join(one.SerializeToString() for one in collector.spans)


def test_messages_are_exported_if_they_are_asked_for(tmp_path: Path, collector: Collector) -> None:
    run = GrowingRun(tmp_path / "fox")
    run.step(0)
    export(run, "messages")
    chats = [named(span.attributes) for span in collector.spans if span.name == "chat policy"]
    [message] = json.loads(chats[0]["gen_ai.input.messages"])
    asked = [{"type": "text", "content": "Who are you?"}]
    assert message == {"role": "user", "parts": asked}
    [answer] = json.loads(chats[0]["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "text", "content": "I am a fox."}]
    assert answer["finish_reason"] == "stop"


def test_a_collector_that_is_away_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    run = GrowingRun(tmp_path / "fox")
    run.step(0)
    export(run, "calls")
    said = [one.getMessage() for one in caplog.records if one.name.startswith("tasks")]
    assert len(said) == 1
    assert "OpenTelemetry does not have all of the run" in said[0]
