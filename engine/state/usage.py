"""Tokens that the sessions of a state folder have used: a log of lines, summed by hour."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import cast

import tinker.types

from durable.files import sealed, unsealed, write_file
from durable.tail import Tail
from engine.state.checkpoints import Clock

USAGE = "usage.jsonl"
HOUR = timedelta(hours=1)
Row = tuple[str, str, Mapping[str, int]]
"""Hour, session, and tokens by kind."""

log = logging.getLogger(__name__)

TRAINED, PREFILL, CACHED, SAMPLED = "trained", "prefill", "cached", "sampled"
"""Kinds of tokens. Those of a prompt are prefill or, with keys and values in memory, cached."""


class UsageLog:
    """Tokens by hour, session and kind, of all engines that have had the state folder.

    A line is in the file before the answer that it counts is given, so that it outlives a killed
    engine; a crash of the machine can lose the last lines. Each engine begins with the sums of
    the lines before it.
    """

    def __init__(self, state: Path, now: Clock) -> None:
        self._now = now
        self._sums: Counter[tuple[str, str, str]] = Counter()
        self._adding = Lock()  # the device thread adds trained tokens, the event loop sampled ones
        path = state / USAGE
        rows, intact = read_usage(path)
        if not intact:
            log.warning("%s is not as it was written: what it has lost is not counted", path)
        for hour, session, used in rows:
            self._take(hour, session, used)
        write_file(path, b"".join(_line(*row) for row in self._by_session().items()))
        self._file = path.open("ab", buffering=0)

    def add(self, session_id: str, **used: int) -> None:
        """Count tokens by kind, in the hour that it is."""
        hour = _hour_of(self._now()).isoformat()
        with self._adding:
            self._file.write(_line((hour, session_id), used))
            self._take(hour, session_id, used)

    def events(
        self, begin: datetime, end: datetime, base_model: str
    ) -> list[tinker.types.BillingUsageEvent]:
        """Return the events of the hours in [begin, end), as the API has them, without prices."""
        with self._adding:
            sums = sorted(self._sums.items())
        return [
            tinker.types.BillingUsageEvent(
                bucket_start=hour,
                bucket_end=hour + HOUR,
                base_model=base_model,
                session_id=session or None,
                event_info=_info(kind, tokens),
            )
            for (at, session, kind), tokens in sums
            if begin <= (hour := datetime.fromisoformat(at)) < end and tokens
        ]

    def _take(self, hour: str, session: str, used: Mapping[str, int]) -> None:
        for kind, tokens in used.items():
            self._sums[hour, session, kind] += tokens

    def _by_session(self) -> dict[tuple[str, str], dict[str, int]]:
        rows: dict[tuple[str, str], dict[str, int]] = {}
        for (hour, session, kind), tokens in self._sums.items():
            rows.setdefault((hour, session), {})[kind] = tokens
        return rows


def read_usage(path: Path) -> tuple[list[Row], bool]:
    """Read the whole lines of a log, and say whether they all are as they were written.

    The torn end that a killed engine has left is no damage.
    """
    try:
        found = Tail(path).read()
    except IsADirectoryError:
        return [], False
    rows = [row for line in found.lines if (row := _row(line)) is not None]
    end_has_changed = _row(found.torn[:-1]) is not None
    return rows, len(rows) == len(found.lines) and not end_has_changed


def _row(line: bytes) -> Row | None:
    """Return the row of a line; None if the line is not as it was written."""
    try:
        return cast(Row, json.loads(unsealed(line + b"\n")))
    except ValueError:
        return None


def _line(whose: tuple[str, str], used: Mapping[str, int]) -> bytes:
    return sealed(json.dumps([*whose, used]).encode())


def _hour_of(time: datetime) -> datetime:
    return time.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _info(kind: str, tokens: int) -> tinker.types.BillingEventInfo:
    if kind == TRAINED:
        return tinker.types.TrainingBillingEvent(token_count=tokens)
    if kind == SAMPLED:
        return tinker.types.SamplingSampleBillingEvent(token_count=tokens)
    return tinker.types.SamplingPrefillBillingEvent(cached=kind == CACHED, token_count=tokens)
