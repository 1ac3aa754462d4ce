"""Protobuf of the Tinker API ⇄ numpy: training requests in, losses and sampled sequences out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from engine.datums import TrainingDatum
from engine.errors import UserError
from engine.sampling import SampledSequence, SampleResult

LARGEST_DENSE = 2**27  # elements of one tensor; a sparse one may name any shape in a few bytes
NUMPY = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
    pb.DTYPE_BFLOAT16: np.dtype(np.uint16),  # widened after reading: numpy has no bfloat16
}

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LossRequest:
    """One chunk of a forward or forward_backward call."""

    model_id: str
    seq_id: int | None
    data: list[TrainingDatum]
    loss: str
    config: dict[str, float | str]
    backward: bool


def parse(body: bytes) -> pb.ForwardBackwardRequest:
    """The message, its tensors still bytes."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def loss_request(message: pb.ForwardBackwardRequest) -> LossRequest:
    """Every tensor checked and dense: float32 or int64, of its declared shape."""
    if not message.data:
        raise UserError("no data to compute a loss on; give at least one datum")
    config: dict[str, float | str] = {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    return LossRequest(
        model_id=message.model_id,
        seq_id=message.seq_id or None,
        data=[_datum(position, datum) for position, datum in enumerate(message.data)],
        loss=message.loss_fn,
        config=config or dict(message.loss_fn_config),
        backward=not message.forward_only,
    )


def _datum(position: int, datum: pb.Datum) -> TrainingDatum:
    try:
        chunks = [_tokens(chunk) for chunk in datum.model_input]
        inputs = {name: _named(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    except UserError as error:
        raise UserError(f"datum {position}: {error}") from error
    tokens = np.concatenate(chunks) if chunks else np.empty(0, np.int32)
    return TrainingDatum(tokens, inputs)


def _named(name: str, tensor: pb.Tensor) -> np.ndarray:
    try:
        return array(tensor)
    except UserError as error:
        raise UserError(f"loss_fn_inputs[{name!r}]: {error}") from error


def _tokens(chunk: pb.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UserError(f"a chunk holds {kind or 'nothing'}; the model of this engine reads text")
    return _read(chunk.encoded_text.tokens, np.dtype(np.int32))


def array(tensor: pb.Tensor) -> np.ndarray:
    """The tensor, dense, with zeros where a sparse one lists nothing."""
    dtype = NUMPY.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"dtype {tensor.dtype} is unknown; send float32, int64, int32 or bfloat16")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or prod(shape) > LARGEST_DENSE:
        raise UserError(f"shape {shape} is not one of at most {LARGEST_DENSE} elements")
    if tensor.HasField("sparse_csr"):
        return _dense(tensor.sparse_csr, dtype, shape)
    values = _read(tensor.dense, dtype)
    if shape and prod(shape) != values.size:
        raise UserError(f"{values.size} values do not fill the shape {shape}")
    return _widened(values.reshape(shape or -1))


def _dense(csr: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 2:
        raise UserError(f"a sparse tensor has two dimensions; this one has the shape {shape}")
    values = _read(csr.values, dtype)
    starts = _read(csr.crow_indices, np.dtype(np.int64))
    columns = _read(csr.col_indices, np.dtype(np.int64))
    dense = np.zeros(shape, dtype)
    dense[csr_rows(starts, columns, values.size, shape), columns] = values
    return _widened(dense)


def csr_rows(
    starts: np.ndarray, columns: np.ndarray, count: int, shape: tuple[int, ...]
) -> np.ndarray:
    """The row of each of `count` listed values. Raises UserError where the indices are unsound."""
    rows, width = shape
    counts = np.diff(starts)
    if (
        starts.size != rows + 1
        or starts[0] != 0
        or starts[-1] != count
        or columns.size != count
        or (counts < 0).any()
        or (columns < 0).any()
        or (columns >= width).any()
    ):
        raise UserError(f"the sparse indices do not describe a matrix of the shape {shape}")
    return np.repeat(np.arange(rows), counts)


def _read(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


def _widened(values: np.ndarray) -> np.ndarray:
    """int32 as int64, and the 16 bits of a bfloat16 as the upper half of a float32; always a copy,
    because what is read from bytes cannot be written to."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64 if values.dtype.kind == "i" else np.float32)


def loss_response(outputs: Sequence[Arrays], metrics: Mapping[str, float]) -> bytes:
    """Per datum its arrays. Neighbours of one signature share a record; ragged ones do not."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for signature, group in groupby(outputs, key=_signature):
        alike = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(alike))
        for name, trailing, _ in signature:
            record.fields[name].CopyFrom(_batched([output[name] for output in alike], trailing))
    return message.SerializeToString()


def _signature(arrays: Arrays) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((name, arrays[name].shape[1:], arrays[name].dtype.kind) for name in sorted(arrays))


def _batched(arrays: Sequence[np.ndarray], trailing: tuple[int, ...]) -> pb.BatchedTensor:
    integers = arrays[0].dtype.kind in "iu"
    chunks = [values.astype(np.int64 if integers else np.float32).tobytes() for values in arrays]
    return pb.BatchedTensor(
        data=b"".join(chunks),
        offsets=np.cumsum([0, *map(len, chunks)], dtype=np.int64).tobytes(),
        dtype=pb.DTYPE_INT64 if integers else pb.DTYPE_FLOAT32,
        trailing_shape=trailing,
    )


Table = tuple[np.ndarray, np.ndarray]
"""Token ids and their log-probabilities, both [positions, k]."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a sampling request may ask besides: see `scoring.py`."""

    topk_sampled: list[Table] | None = None
    targets: pb.Tensor | None = None
    alternatives: Table | None = None


def sample_response(result: SampleResult, extras: Extras | None = None) -> bytes:
    """The sequences, and what was asked for about them and the prompt."""
    message = pb.SampleResponse(sequences=[_sequence(sequence) for sequence in result.sequences])
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_table(*result.topk_prompt_logprobs))
    if extras is not None:
        _add(message, extras)
    return message.SerializeToString()


def _add(message: pb.SampleResponse, extras: Extras) -> None:
    if extras.topk_sampled is not None:
        for sequence, table in zip(message.sequences, extras.topk_sampled, strict=True):
            sequence.topk_sampled_logprobs.CopyFrom(_table(*table))
    if extras.targets is not None:
        message.target_prompt_logprobs.CopyFrom(extras.targets)
    if extras.alternatives is not None:
        tokens, logprobs = extras.alternatives
        message.prompt_alt_tokens.tokens.CopyFrom(tensor(tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(tensor(logprobs))


def tensor(values: np.ndarray) -> pb.Tensor:
    """Dense: whole numbers as int64, others as float32."""
    integers = values.dtype.kind in "iu"
    return pb.Tensor(
        dense=values.astype(np.int64 if integers else np.float32).tobytes(),
        dtype=pb.DTYPE_INT64 if integers else pb.DTYPE_FLOAT32,
        shape=values.shape,
    )


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    stopped = sequence.stop_reason == "stop"
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
        tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
        logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
    )


def _table(token_ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    length, width = token_ids.shape
    return pb.TopkLogprobs(
        token_ids=token_ids.astype(np.int32).tobytes(),
        logprobs=logprobs.astype(np.float32).tobytes(),
        k=width,
        length=length,
    )
