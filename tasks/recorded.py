"""spans → the calls that an interrupted rollout need not sample again."""

from collections import defaultdict
from collections.abc import Iterable

from adapters.calls import Completion
from tasks.spans import ERROR, LLM, Span, completion_of

Calls = dict[tuple[str, int], Span]


def recorded_calls(spans: Iterable[Span]) -> dict[str, list[Completion]]:
    """Rollout → its answered calls since it last failed, from a journal's spans in their order.

    An attempt that was cut off early does not hide what an earlier one has answered beyond it,
    unless it asked something else: then it was on another way.
    """
    answered: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span["kind"] == LLM:
            answered[span["rollout_id"]].append(span)
        elif span["kind"] == ERROR:
            answered.pop(span["rollout_id"], None)
    return {rollout: _merged(calls) for rollout, calls in answered.items()}


def _merged(spans: list[Span]) -> list[Completion]:
    calls: Calls = {}
    for span in sorted(spans, key=lambda span: (span["attempt"], span["role"], span["call"])):
        place = span["role"], span["call"]
        before = calls.get(place)
        if before is not None and before["request_sha"] != span["request_sha"]:
            calls = {
                key: value for key, value in calls.items() if key < place or key[0] != place[0]
            }
        calls[place] = span
    return [completion_of(span) for span in calls.values()]
