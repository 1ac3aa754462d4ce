"""What a server answers of datums and of prompts: protobuf, or JSON up to SDK 0.24."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import nan
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from ratchet.durable.wire.tensors import Malformed, dtype_of, locating, read_array, read_json, widen

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""What a cell of a table of likeliest tokens has where there is none."""
LOSS = "loss:sum"
"""Metric that the SDK takes for granted."""
STOPPED = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
FLOAT, INTEGER = np.dtype(np.float32), np.dtype(np.int32)

Fields = Mapping[str, np.ndarray]
"""What a loss tells of a datum: its log-probabilities, and anything else, by name."""
Table = tuple[np.ndarray, np.ndarray]
"""Token ids and their log-probabilities, both [positions, k]."""


def encode_losses(
    outputs: Sequence[Fields], metrics: Mapping[str, float], kind: str = "ArrayRecord"
) -> pb.ForwardBackwardOutput:
    """Encode each datum's arrays; consecutive datums of [T] or [T, k] share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=kind, metrics=metrics)

    def layout(fields: Fields) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, one.dtype.name, one.shape[1:]) for name, one in sorted(fields.items())]

    for _, group in groupby(outputs, key=layout):
        together = [*group]
        record = message.loss_fn_outputs.add(num_datums=len(together))
        for name, first in together[0].items():
            chunks = [fields[name].tobytes() for fields in together]
            record.fields[name].CopyFrom(
                pb.BatchedTensor(
                    data=b"".join(chunks),
                    offsets=np.cumsum([0, *map(len, chunks)], dtype=np.int64).tobytes(),
                    dtype=pb.DTYPE_INT64 if first.dtype.kind == "i" else pb.DTYPE_FLOAT32,
                    trailing_shape=first.shape[1:],
                )
            )
    return message


def decode_losses(message: pb.ForwardBackwardOutput) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each datum, of float32 or int64."""
    outputs: list[dict[str, np.ndarray]] = []
    for record in message.loss_fn_outputs:
        datums: list[dict[str, np.ndarray]] = [{} for _ in range(record.num_datums)]
        for name, batched in record.fields.items():
            dtype = dtype_of(batched.dtype)
            values = widen(read_array(batched.data, dtype))
            places = read_array(batched.offsets, np.dtype(np.int64)) // dtype.itemsize
            shape = (-1, *batched.trailing_shape)
            for datum, start, end in zip(datums, places[:-1], places[1:], strict=True):
                datum[name] = values[start:end].reshape(shape)
        outputs += datums
    return outputs


def losses_from_json(answer: Mapping[str, Any]) -> pb.ForwardBackwardOutput:
    outputs = []
    for position, fields in enumerate(answer["loss_fn_outputs"]):
        with locating(f"the output of datum {position}"):
            outputs.append({name: read_json(tensor) for name, tensor in fields.items()})
    kind = answer.get("loss_fn_output_type") or "ArrayRecord"
    return encode_losses(outputs, answer.get("metrics") or {}, kind)


def add_loss(message: pb.ForwardBackwardOutput) -> None:
    """Add the sum of the loss where a server tells none: by its tokens, or else as not known."""
    if LOSS in message.metrics:
        return
    told = [fields.get("elementwise_loss") for fields in decode_losses(message)]
    known = [losses.sum(dtype=np.float64) for losses in told if losses is not None]
    message.metrics[LOSS] = float(sum(known)) if known and len(known) == len(told) else nan


def encode_table(token_ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    length, width = token_ids.shape
    return pb.TopkLogprobs(
        token_ids=token_ids.astype(INTEGER).tobytes(),
        logprobs=logprobs.astype(FLOAT).tobytes(),
        k=width,
        length=length,
    )


def sample_from_json(answer: Mapping[str, Any]) -> pb.SampleResponse:
    message = pb.SampleResponse(prompt_cache_hit_tokens=answer.get("prompt_cache_hit_tokens") or 0)
    for one in answer["sequences"]:
        reason = STOPPED.get(one["stop_reason"])
        if reason is None:
            raise Malformed(f"a sequence stopped by {one['stop_reason']!r}; 'stop' or 'length'")
        message.sequences.add(
            stop_reason=reason,
            tokens=np.array(one["tokens"], INTEGER).tobytes(),
            logprobs=np.array(one.get("logprobs") or [], FLOAT).tobytes(),
        )
    if (scores := answer.get("prompt_logprobs")) is not None:
        known = [nan if score is None else score for score in scores]
        message.prompt_logprobs = np.array(known, FLOAT).tobytes()
    if (rows := answer.get("topk_prompt_logprobs")) is not None:
        message.topk_prompt_logprobs.CopyFrom(encode_table(*_table(rows)))
    return message


def _table(rows: Sequence[Sequence[tuple[int, float]] | None]) -> Table:
    width = max((len(row) for row in rows if row), default=1)
    ids = np.full((len(rows), width), NO_TOKEN, INTEGER)
    scores = np.full((len(rows), width), NO_LOGPROB, FLOAT)
    for position, row in enumerate(rows):
        for column, (token, score) in enumerate(row or ()):
            ids[position, column], scores[position, column] = token, score
    return ids, scores


def complete_prompt(message: pb.SampleResponse, length: int) -> None:
    """Put the first token of a prompt, which has no score, before scores that lack its place."""
    if len(message.prompt_logprobs) == (length - 1) * FLOAT.itemsize:
        first = np.array([nan], FLOAT).tobytes()
        message.prompt_logprobs = first + message.prompt_logprobs
    table = message.topk_prompt_logprobs
    if message.HasField("topk_prompt_logprobs") and table.length == length - 1:
        ids, scores = np.full(table.k, NO_TOKEN, INTEGER), np.full(table.k, NO_LOGPROB, FLOAT)
        table.token_ids = ids.tobytes() + table.token_ids
        table.logprobs = scores.tobytes() + table.logprobs
        table.length = length
