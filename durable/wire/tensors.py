"""Tensors of the Tinker API: protobuf and JSON, to numpy arrays and from them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

LARGEST_DENSE = 2**27  # elements of a tensor; a few sparse bytes can declare any shape
NUMPY: dict[int, np.dtype] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
    pb.DTYPE_BFLOAT16: np.dtype(np.uint16),  # widened after reading: numpy has no bfloat16
}
NAMED = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}
"""Types that a tensor in JSON may have."""


class Malformed(ValueError):
    """A message that says nothing, or what the other form of it cannot say."""


@contextmanager
def locating(what: str) -> Iterator[None]:
    """Put the part of a message that is malformed before what is said of it."""
    try:
        yield
    except Malformed as error:
        raise Malformed(f"{what}: {error}") from error


def decode_tensor(tensor: pb.Tensor) -> np.ndarray:
    """Decode a tensor to a dense array, with zeros where a sparse tensor lists nothing.

    The array is of float32 or int64.
    """
    dtype = dtype_of(tensor.dtype)
    shape = _checked(tuple(tensor.shape))
    if tensor.HasField("sparse_csr"):
        return _decode_sparse(tensor.sparse_csr, dtype, shape)
    values = read_array(tensor.dense, dtype)
    if shape and prod(shape) != values.size:
        raise Malformed(f"{values.size} values do not fill the shape {shape}")
    return widen(values.reshape(shape or -1))


def dtype_of(number: int) -> np.dtype:
    """Return the type of the numbers whose bytes a message holds."""
    dtype = NUMPY.get(number)
    if dtype is None:
        raise Malformed(f"dtype {number} is unknown; send float32, int64, int32 or bfloat16")
    return dtype


def _checked(shape: tuple[int, ...]) -> tuple[int, ...]:
    if any(size < 0 for size in shape) or prod(shape) > LARGEST_DENSE:
        raise Malformed(
            f"the shape {shape} has a negative size or more than {LARGEST_DENSE} elements; "
            "send smaller tensors"
        )
    return shape


def _decode_sparse(csr: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 2:
        raise Malformed(f"a sparse tensor has two dimensions; this one has the shape {shape}")
    values = read_array(csr.values, dtype)
    starts = read_array(csr.crow_indices, np.dtype(np.int64))
    columns = read_array(csr.col_indices, np.dtype(np.int64))
    dense = np.zeros(shape, dtype)
    dense[csr_rows(starts, columns, values.size, shape), columns] = values
    return widen(dense)


def csr_rows(
    starts: np.ndarray, columns: np.ndarray, count: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the row of each of `count` listed values; raise Malformed for invalid indices."""
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
        raise Malformed(f"the sparse indices do not describe a matrix of the shape {shape}")
    return np.repeat(np.arange(rows), counts)


def read_array(data: bytes, dtype: np.dtype) -> np.ndarray:
    """View bytes as numbers of a type."""
    if len(data) % dtype.itemsize:
        raise Malformed(f"{len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


def widen(values: np.ndarray) -> np.ndarray:
    """Copy int32 to int64, and the 16 bits of a bfloat16 to the upper half of a float32.

    A copy is always made, because arrays that view bytes are read-only.
    """
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64 if values.dtype.kind == "i" else np.float32)


def encode_tensor(values: np.ndarray) -> pb.Tensor:
    """Encode a dense tensor: integers as int64, other numbers as float32."""
    integers = values.dtype.kind in "iu"
    return pb.Tensor(
        dense=values.astype(np.int64 if integers else np.float32).tobytes(),
        dtype=pb.DTYPE_INT64 if integers else pb.DTYPE_FLOAT32,
        shape=values.shape,
    )


def write_json(values: np.ndarray) -> dict[str, Any]:
    """Write an array of float32 or int64 as a tensor in JSON, exactly."""
    return {"data": values.ravel().tolist(), "dtype": values.dtype.name, "shape": [*values.shape]}


def read_json(tensor: Mapping[str, Any]) -> np.ndarray:
    """Read a tensor in JSON; one without a shape is a row of numbers."""
    data, named = tensor.get("data"), tensor.get("dtype")
    dtype = NAMED.get(named) if isinstance(named, str) else None
    if not isinstance(data, list) or dtype is None:
        raise Malformed(f"a tensor has the dtype {named!r}; send data of float32 or int64")
    try:
        values = np.array(data, dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise Malformed(f"the data are not of {named}: {error}") from error
    shape = _checked(tuple(tensor.get("shape") or (values.size,)))
    if prod(shape) != values.size:
        raise Malformed(f"{values.size} values do not fill the shape {shape}")
    return values.reshape(shape)
