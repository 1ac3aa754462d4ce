"""The protocol between the door and the player of a rollout batch: paths, records, and codes.

A player begins an attempt at a batch, plays its rollouts, and tells the door of each end. It shows
the token of the batch. The agent of a rollout shows another key, which opens the roles of that
rollout attempt and nothing else: an agent cannot tell the door its own reward. The records are sent
as JSON. Whoever receives one reads it strictly: true is no number.
"""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from ratchet.adapters.calls import Example, JsonObject
from ratchet.adapters.redaction import redact
from ratchet.adapters.rewards import Reward, read_reward

BATCH = "/batch/{batch}"
BEGIN = BATCH + "/begin"
ROLLOUT = BATCH + "/rollout/{rollout_id}/attempt/{attempt}"
END = ROLLOUT + "/end"
WAITED = ROLLOUT + "/waited"
ROLE = ROLLOUT + "/role/{role}/v1"
"""Paths of the door."""

OVER = "over"
"""Code of a refusal: the batch, or the attempt at a rollout, has ended."""
NOT_BEGUN = "not_begun"
"""Code of a refusal: the batch cannot begin, or the attempt at a rollout has not begun."""
NOT_RECORDED = "not_recorded"
"""Code of a refusal: what was told could not be recorded."""

LONGEST_MESSAGE = 10_000
"""Characters that are kept of an error's message: few enough for the last line of a program. The
middle of a longer message is left out, since its last line often says most."""
CUT = "\n…\n"

Seconds = Annotated[float, Field(ge=0, lt=1e9)]
"""Seconds of a rollout attempt: fewer than 30 years, so that its start is a date."""


class Record:
    """Base of what door and player send each other."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class PlaceSettings(Record):
    """Settings of the places of rollouts: what fills, holds and scores each."""

    folder: str
    """Folder that has a place for each rollout, by the rollout's id."""
    template: str | None
    variables: Mapping[str, str]
    kept: Literal["failed", "always", "never"]
    caged: bool
    reads: Sequence[str]
    """Folders that a caged program may read beside those of the system."""
    reward: str | None
    """Command line that scores a place after the program's end."""
    reward_seconds: float
    most_mib: int
    most_files: int
    most_memory_mib: int
    """MiB of memory of all processes of a caged program together."""
    most_processes: int


@dataclass(frozen=True)
class PlaySettings(Record):
    """Settings of a batch for its player: the agent, its roles, its limits, and its places."""

    agent: str
    roles: Sequence[str]
    concurrency: int
    timeout_seconds: float
    place: PlaceSettings | None = None


@dataclass(frozen=True)
class BegunRollout(Record):
    """A rollout to play. An `isolated` one is played in a process of its own."""

    id: str
    example: Example
    isolated: bool


@dataclass(frozen=True)
class BegunBatch(Record):
    """An attempt at a batch: the rollouts that are left, and how they are played."""

    attempt: Annotated[int, Field(ge=0)]
    rollouts: Sequence[BegunRollout]
    settings: PlaySettings


@dataclass(frozen=True)
class Failure:
    """Error of an agent, by the name of its class, or refusal of a call, by its code.

    Its message is short, and has no secrets: services repeat keys that they refuse.
    """

    kind: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shorten_message(redact(self.message)))


Outcome = Reward | Failure


def write_outcome(outcome: Outcome) -> JsonObject:
    if isinstance(outcome, Failure):
        return {"failed": outcome.kind, "message": outcome.message}
    return {"reward": outcome.to_json()}


def read_outcome(value: object) -> Outcome:
    """Read what `write_outcome` returns; ValueError if the value is no outcome."""
    match value:
        case {"failed": str(kind), "message": str(message), **rest} if not rest:
            return Failure(kind, message)
        case {"reward": reward, **rest} if not rest:
            return read_reward(reward)
    raise ValueError("an outcome has `reward`, or `failed` and `message`, and nothing else")


def _refuse_told(value: object) -> object:
    raise ValueError("a player does not tell it: the door fills it in")


OF_DOOR = (Field(exclude=True), BeforeValidator(_refuse_told))
"""Marks of a field that a player does not tell: the door fills it in."""


@dataclass(frozen=True)
class RolloutEnd(Record):
    """End of a rollout attempt: its player tells the first two fields, and the door the others."""

    outcome: Annotated[Outcome, PlainValidator(read_outcome), PlainSerializer(write_outcome)]
    seconds: Seconds
    """Time from the beginning of the attempt to its end."""
    rollout_id: Annotated[str, *OF_DOOR] = ""
    attempt: Annotated[int, *OF_DOOR] = 0
    calls: Annotated[Mapping[str, Sequence[int]], *OF_DOOR] = field(default_factory=dict)
    """Numbers of the answered calls of every role."""
    refused: Annotated[int, *OF_DOOR] = 0
    """Calls that were refused because the attempt had made all it may make."""
    unanswered: Annotated[Failure | None, *OF_DOOR] = None
    """Refusal of a call that the service has not answered, by its code, if there is one."""


@dataclass(frozen=True)
class WaitedTime(Record):
    """Time in which the agent of a rollout attempt could get no answer."""

    seconds: Seconds


def rollout_key(token: str, rollout_id: str, attempt: str | int) -> str:
    """Derive an agent's key of a rollout attempt from the token of the batch, by HMAC.

    From the key, neither the token nor the key of another attempt can be derived.
    """
    return hmac.new(token.encode(), f"{rollout_id}/{attempt}".encode(), "sha256").hexdigest()


R = TypeVar("R", bound=Record)


def read_record(kind: type[R], content: bytes) -> R:
    """Read a record from JSON; ValueError if the content is no such record."""
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{field}: {first['msg']}" if field else first["msg"]) from error


def write_record(record: Record) -> bytes:
    """Write a record as JSON; ValueError if it has a number that JSON lacks."""
    return encode_json(_adapter(type(record)).dump_python(record))


def copy_record(record: R) -> R:
    """Return a record as whoever receives it reads it; it shares nothing with the first one."""
    return read_record(type(record), write_record(record))


def encode_json(value: Mapping[str, object]) -> bytes:
    """Return a line of JSON, with a question mark for a character that UTF-8 lacks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace")


@cache
def _adapter(kind: type[R]) -> TypeAdapter[R]:
    return TypeAdapter(kind)


def shorten_message(told: str) -> str:
    """Leave out the middle of an error's message that is longer than LONGEST_MESSAGE."""
    if len(told) <= LONGEST_MESSAGE:
        return told
    return told[: LONGEST_MESSAGE // 2] + CUT + told[-LONGEST_MESSAGE // 2 :]
