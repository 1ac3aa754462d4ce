"""OpenTelemetry: a trace a rollout and a span a call, by the conventions for generative AI."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING

from adapters.calls import Message
from adapters.tracking.tracker import TrackedCall, TrackedRun, TrackedStep, Tracker, TrackerFailed

if TYPE_CHECKING:  # the exporter is an extra
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

SPANS_A_REQUEST = 256


class OpenTelemetryTracker(Tracker):
    """The exporter of a run's calls, which the standard variables OTEL_EXPORTER_OTLP_… set up.

    Ids derive from the run and the call: a span that is sent again is the same span.
    """

    def __init__(self, with_messages: bool, run: TrackedRun) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # it is told once
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "ratchet"}
        self._resource = Resource.create(named)
        self._exporter = OTLPSpanExporter()
        self._with_messages, self._run = with_messages, run
        self._note = run.folder / "opentelemetry_next_step"

    def next_step(self) -> int:
        """Return the step after the last one that a collector has taken."""
        return int(self._note.read_text()) if self._note.exists() else 0

    def send(self, step: TrackedStep) -> None:
        """Export the spans of a step's calls."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        calls = iter(step.calls())
        while some := [self._span(call) for call in islice(calls, SPANS_A_REQUEST)]:
            if self._exporter.export(some) is not SpanExportResult.SUCCESS:
                raise TrackerFailed("the collector does not take the spans of a step")
        self._note.parent.mkdir(parents=True, exist_ok=True)
        self._note.write_text(f"{step.number + 1}")

    def close(self) -> None:
        """Close the exporter's connection."""
        self._exporter.shutdown()

    def _span(self, call: TrackedCall) -> "ReadableSpan":
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        whole = call.id == call.attempt
        attributes = {name: value for name, value in call.attributes.items() if value is not None}
        attributes["ratchet.run"] = self._run.name
        if self._with_messages and not whole:
            attributes |= dict(_messages(call, call.attributes))
        if call.error is not None:
            attributes["error.type"] = call.error.partition(":")[0]
        return ReadableSpan(
            call.name,
            context=self._context(call.rollout, call.id),
            parent=None if whole else self._context(call.rollout, call.attempt),
            resource=self._resource,
            attributes=attributes,  # pyright: ignore[reportArgumentType]: they are JSON's values
            kind=SpanKind.INTERNAL if whole else SpanKind.CLIENT,
            status=Status() if call.error is None else Status(StatusCode.ERROR, call.error),
            start_time=_nanoseconds(call.started),
            end_time=_nanoseconds(call.ended),
        )

    def _context(self, rollout: str, span: str) -> "SpanContext":
        from opentelemetry.trace import SpanContext, TraceFlags

        trace, own = (
            sha256(f"{self._run.id}/{name}".encode()).digest() for name in (rollout, span)
        )
        return SpanContext(
            int.from_bytes(trace[:16]),
            int.from_bytes(own[:8]),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000


def _messages(call: TrackedCall, attributes: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the messages of a call, as the conventions have them."""
    if call.messages:
        asked: Sequence[Message] = json.loads(call.messages)
        yield "gen_ai.input.messages", json.dumps([_message(message) for message in asked])
    if call.reply:
        reasons = attributes.get("gen_ai.response.finish_reasons")
        reason = reasons[0] if isinstance(reasons, list) and reasons else "stop"
        answer = {**_message(json.loads(call.reply)), "finish_reason": reason}
        yield "gen_ai.output.messages", json.dumps([answer])


def _message(message: Message) -> dict[str, object]:
    parts: list[dict[str, object]] = []
    if "tool_call_id" in message:
        answered = {"id": message["tool_call_id"], "response": message.get("content")}
        parts.append({"type": "tool_call_response", **answered})
    elif message.get("content"):
        parts.append({"type": "text", "content": message["content"]})
    for call in message.get("tool_calls") or ():
        parts.append({"type": "tool_call", "id": call.get("id"), **call["function"]})
    return {"role": message["role"], "parts": parts}
