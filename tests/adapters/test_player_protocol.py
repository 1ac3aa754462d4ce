"""The records that door and player send each other."""

import pytest

from ratchet.adapters.player_protocol import (
    BegunBatch,
    BegunRollout,
    Failure,
    PlaySettings,
    Record,
    RolloutEnd,
    WaitedTime,
    read_record,
    write_record,
)
from ratchet.adapters.rewards import Reward

END = write_record(RolloutEnd(Failure("KeyError", "'name'"), 0.0))
BEGUN = BegunBatch(
    2,
    [BegunRollout("train-00000-0000-00", {"k": [1, None, {"ä": 0.1}], "true": True}, True)],
    PlaySettings("hello", ["policy", "judge"], 8, 10.0),
)


@pytest.mark.parametrize(
    "record",
    [
        BEGUN,
        RolloutEnd(Reward(0.5), 0.25),
        RolloutEnd(Reward(3.0, {"policy": 3.0, "judge": 1.0}, {"policy": (1.0, 2.0)}), 1.0),
        RolloutEnd(Failure("KeyError", "'name'"), 0.0),
        WaitedTime(1.5),
    ],
    ids=lambda record: str(record)[:40],
)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert read_record(type(record), write_record(record)) == record


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        (WaitedTime, b'{"seconds": true}', "seconds: Input should be a valid number"),
        (WaitedTime, b'{"seconds": Infinity}', "seconds: Input should be a finite number"),
        (WaitedTime, b"[]", "Input should be an object"),
        (RolloutEnd, END[:-1] + b', "refused": 5}', "refused: .* the door fills it in"),
        (RolloutEnd, END[:-1] + b', "rollout_id": "x"}', "rollout_id: .* the door"),
        (BegunBatch, write_record(BEGUN).replace(b": 2,", b": true,"), "attempt: .* integer"),
        (BegunBatch, write_record(BEGUN).replace(b": 8,", b": 8.5,"), "settings.concurrency: "),
        (BegunBatch, write_record(BEGUN).replace(b'd": true}', b'd": 1}'), "rollouts.0.isolated: "),
    ],
)
def test_what_is_no_such_record_is_refused_by_the_field(
    kind: type[Record], content: bytes, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        read_record(kind, content)
