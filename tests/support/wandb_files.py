"""Reading of what W&B has written to an offline folder: LevelDB's log of protocol buffers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import wait_until

BLOCK = 32768
FILE_HEADER, RECORD_HEADER = 7, 7
FULL, LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """Return the records of an offline folder, whose last W&B's process writes after the run."""
    found: list[Any] = []

    def ended() -> bool:
        found[:] = _whole_records(folder)
        return any(record.HasField("exit") for record in found)

    wait_until("the end of a W&B run", ended)
    return found


def _whole_records(folder: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    [file] = folder.glob("run-*.wandb")
    data, at, parts = file.read_bytes(), FILE_HEADER, b""
    while at + RECORD_HEADER <= len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        at += RECORD_HEADER
        if at + length > len(data):
            return  # it is being written
        parts += data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the history, with W&B's own step as `_step`."""
    found = [record.history for record in records(folder) if record.HasField("history")]
    return [
        {"_step": one.step.num}
        | {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in one.item}
        for one in found
    ]


def config(folder: Path) -> dict[str, Any]:
    """Return the config of the run."""
    [run] = [record.run for record in records(folder) if record.HasField("run")]
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def artifacts(folder: Path) -> list[Any]:
    """Return the checkpoints that were logged."""
    logged = [record.artifact for record in records(folder) if record.HasField("artifact")]
    return [artifact for artifact in logged if artifact.type == "model"]
