"""Protobuf messages of the Tinker API, decoded to and encoded from numpy arrays."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from math import prod

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from engine.errors import RequestRefused
from engine.sampling.requests import SampledSequence, SampleResult
from engine.training.datums import TrainingDatum

LARGEST_DENSE = 2**27  # elements of a tensor; a few sparse bytes can declare any shape
NUMPY = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
    pb.DTYPE_BFLOAT16: np.dtype(np.uint16),  # widened after reading: numpy has no bfloat16
}

Table = tuple[np.ndarray, np.ndarray]
"""Token ids and their log-probabilities, both [positions, k]."""


def parse(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse the message; its tensors remain bytes."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestRefused(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def decode_data(message: pb.ForwardBackwardRequest) -> list[TrainingDatum]:
    """Check every tensor and make it dense: float32 or int64, of its declared shape."""
    if not message.data:
        raise RequestRefused("no data to compute a loss on; give at least one datum")
    return [_decode_datum(position, datum) for position, datum in enumerate(message.data)]


def decode_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    config: dict[str, float | str] = {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    return config or dict(message.loss_fn_config)


def _decode_datum(position: int, datum: pb.Datum) -> TrainingDatum:
    inputs: dict[str, np.ndarray] = {}
    with _refusing(f"datum {position}"):
        chunks = [_read_tokens(chunk) for chunk in datum.model_input]
        for name, tensor in datum.loss_fn_inputs.items():
            with _refusing(f"loss_fn_inputs[{name!r}]"):
                inputs[name] = decode_tensor(tensor)
    tokens = np.concatenate(chunks) if chunks else np.empty(0, np.int32)
    return TrainingDatum(tokens, inputs)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Put what is refused before the message of a RequestRefused."""
    try:
        yield
    except RequestRefused as error:
        raise RequestRefused(f"{what}: {error}") from error


def _read_tokens(chunk: pb.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise RequestRefused(
            f"a chunk holds {kind or 'nothing'}; the model of this engine reads text"
        )
    return _read(chunk.encoded_text.tokens, np.dtype(np.int32))


def decode_tensor(tensor: pb.Tensor) -> np.ndarray:
    """Decode a tensor to a dense array, with zeros where a sparse tensor lists nothing."""
    dtype = NUMPY.get(tensor.dtype)
    if dtype is None:
        raise RequestRefused(
            f"dtype {tensor.dtype} is unknown; send float32, int64, int32 or bfloat16"
        )
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or prod(shape) > LARGEST_DENSE:
        raise RequestRefused(
            f"the shape {shape} has a negative size or more than {LARGEST_DENSE} elements; "
            "send smaller tensors"
        )
    if tensor.HasField("sparse_csr"):
        return _decode_sparse(tensor.sparse_csr, dtype, shape)
    values = _read(tensor.dense, dtype)
    if shape and prod(shape) != values.size:
        raise RequestRefused(f"{values.size} values do not fill the shape {shape}")
    return _widen(values.reshape(shape or -1))


def _decode_sparse(csr: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 2:
        raise RequestRefused(f"a sparse tensor has two dimensions; this one has the shape {shape}")
    values = _read(csr.values, dtype)
    starts = _read(csr.crow_indices, np.dtype(np.int64))
    columns = _read(csr.col_indices, np.dtype(np.int64))
    dense = np.zeros(shape, dtype)
    dense[csr_rows(starts, columns, values.size, shape), columns] = values
    return _widen(dense)


def csr_rows(
    starts: np.ndarray, columns: np.ndarray, count: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the row of each of `count` listed values; raise RequestRefused for invalid indices."""
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
        raise RequestRefused(f"the sparse indices do not describe a matrix of the shape {shape}")
    return np.repeat(np.arange(rows), counts)


def _read(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestRefused(f"{len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


def _widen(values: np.ndarray) -> np.ndarray:
    """Copy int32 to int64, and the 16 bits of a bfloat16 to the upper half of a float32.

    A copy is always made, because arrays that view bytes are read-only.
    """
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64 if values.dtype.kind == "i" else np.float32)


def encode_losses(outputs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode each datum's log-probabilities; consecutive ones [T] or [T, k] share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing, group in groupby(outputs, key=lambda output: output.shape[1:]):
        chunks = [output.tobytes() for output in group]
        record = message.loss_fn_outputs.add(num_datums=len(chunks))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(chunks),
                offsets=np.cumsum([0, *map(len, chunks)], dtype=np.int64).tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            )
        )
    return message.SerializeToString()


def encode_sample(result: SampleResult) -> pb.SampleResponse:
    message = pb.SampleResponse(
        sequences=map(_encode_sequence, result.sequences),
        prompt_cache_hit_tokens=result.cached_tokens,
    )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(encode_table(*result.topk_prompt_logprobs))
    return message


def encode_tensor(values: np.ndarray) -> pb.Tensor:
    """Encode a dense tensor: integers as int64, other numbers as float32."""
    integers = values.dtype.kind in "iu"
    return pb.Tensor(
        dense=values.astype(np.int64 if integers else np.float32).tobytes(),
        dtype=pb.DTYPE_INT64 if integers else pb.DTYPE_FLOAT32,
        shape=values.shape,
    )


def _encode_sequence(sequence: SampledSequence) -> pb.SampledSequence:
    stopped = sequence.stop_reason == "stop"
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
        tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
        logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
    )


def encode_table(token_ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    length, width = token_ids.shape
    return pb.TopkLogprobs(
        token_ids=token_ids.astype(np.int32).tobytes(),
        logprobs=logprobs.astype(np.float32).tobytes(),
        k=width,
        length=length,
    )
