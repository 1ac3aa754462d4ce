"""Rows of trajectories, written by hand, as a table."""

from typing import Any

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("role", pa.string()),
        ("first_call", pa.int32()),
        ("policy_version", pa.string()),
        ("reward", pa.float64()),
        ("truncated", pa.bool_()),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.int8())),
        ("call_numbers", pa.list_(pa.int32())),
        ("call_tokens", pa.list_(pa.int32())),
        ("call_rewards", pa.list_(pa.float64())),
    ]
)


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)
