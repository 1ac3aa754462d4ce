"""Wire formats: the engine decodes what the SDK encodes, and the reverse."""

import numpy as np
import pytest
import tinker
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from ratchet.durable.wire.datums import decode_config
from ratchet.durable.wire.tensors import Malformed, decode_tensor
from ratchet.engine.api.sampling_routes import encode_sample
from ratchet.engine.api.training_routes import decode_data, encode_logprobs
from ratchet.engine.errors import RequestRefused
from ratchet.engine.sampling.requests import SampledSequence, SampleResult

shapes = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=6)
finite = st.floats(width=32, allow_nan=False)
floats = shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=finite))
integers = shapes.flatmap(lambda shape: arrays.arrays(np.int64, shape))
mostly_zero = arrays.arrays(np.int64, (7, 9), elements=st.sampled_from([0, 0, 0, 0, 5, 2**40]))


def request(
    inputs: dict[str, np.ndarray] | None = None, config: dict[str, float | str] | None = None
) -> pb.ForwardBackwardRequest:
    """Encode a request as the SDK does, and parse its bytes."""
    tensors = {name: tinker.TensorData.from_numpy(one) for name, one in (inputs or {}).items()}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=tensors)
    made = tinker.types.ForwardBackwardRequest(
        model_id="model",
        seq_id=7,
        forward_backward_input=tinker.types.ForwardBackwardInput(
            data=[datum], loss_fn="cross_entropy", loss_fn_config=config
        ),
    )
    sent = forward_backward_request_to_proto(made).SerializeToString()
    return pb.ForwardBackwardRequest.FromString(sent)


@given(floats | integers)
def test_dense_tensor_is_decoded_unchanged(values: np.ndarray) -> None:
    arrived = decode_data(request({"values": values}))[0].inputs["values"]
    assert arrived.dtype == values.dtype
    assert arrived.shape == values.shape
    assert np.array_equal(arrived, values)
    assert arrived.flags.writeable


@given(mostly_zero)
def test_sparse_matrix_is_decoded_dense(values: np.ndarray) -> None:
    sparse = tinker.TensorData.from_torch_sparse(torch.from_numpy(values))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1]), loss_fn_inputs={"weights": sparse}
    )
    made = tinker.types.ForwardBackwardRequest(
        model_id="model",
        seq_id=1,
        forward_backward_input=tinker.types.ForwardBackwardInput(data=[datum], loss_fn="ppo"),
    )
    message = forward_backward_request_to_proto(made)
    assert np.array_equal(decode_tensor(message.data[0].loss_fn_inputs["weights"]), values)


def test_bfloat16_tensor_is_decoded_to_float32() -> None:
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy()
    tensor = pb.Tensor(dense=half.tobytes(), dtype=pb.DTYPE_BFLOAT16, shape=[2])
    assert decode_tensor(tensor).tolist() == [1.5, -2.0]
    assert decode_tensor(tensor).dtype == np.float32


def test_request_is_decoded_with_number_tokens_and_config() -> None:
    message = request(config={"clip_low_threshold": 0.5, "mode": "a"})
    assert (message.model_id, message.seq_id, message.loss_fn) == ("model", 7, "cross_entropy")
    assert list(decode_data(message)[0].tokens) == [1, 2]
    assert decode_config(message) == {"clip_low_threshold": 0.5, "mode": "a"}


@given(st.binary(max_size=60))
def test_malformed_bytes_are_a_user_error(body: bytes) -> None:
    with pytest.raises((RequestRefused, Malformed, DecodeError)):
        decode_data(pb.ForwardBackwardRequest.FromString(body))


def test_a_request_without_datums_is_refused() -> None:
    with pytest.raises(RequestRefused, match="give at least one datum"):
        decode_data(pb.ForwardBackwardRequest())


@given(
    values=st.binary(max_size=24),
    starts=st.lists(st.integers(-2, 5), max_size=4),
    columns=st.lists(st.integers(-2, 5), max_size=4),
    shape=st.lists(st.integers(-1, 4), max_size=3),
    dtype=st.integers(0, 5),
)
def test_any_sparse_tensor_is_decoded_or_a_user_error(
    values: bytes, starts: list[int], columns: list[int], shape: list[int], dtype: int
) -> None:
    csr = pb.SparseCsr(
        values=values,
        crow_indices=np.array(starts, np.int64).tobytes(),
        col_indices=np.array(columns, np.int64).tobytes(),
    )
    tensor = pb.Tensor(sparse_csr=csr, shape=shape)
    tensor.dtype = dtype  # type: ignore[assignment]
    try:
        dense = decode_tensor(tensor)
    except Malformed:
        return
    assert list(dense.shape) == shape


def test_tensor_that_does_not_fill_its_shape_is_named() -> None:
    message = request({"weights": np.zeros(3, np.float32)})
    message.data[0].loss_fn_inputs["weights"].shape[0] = 4
    with pytest.raises(Malformed, match=r"datum 0: loss_fn_inputs\['weights'\]: 3 values"):
        decode_data(message)


def test_sparse_tensor_of_a_huge_shape_is_refused() -> None:
    huge = pb.Tensor(sparse_csr=pb.SparseCsr(), dtype=pb.DTYPE_FLOAT32, shape=[2**31, 2**31])
    with pytest.raises(Malformed, match="elements"):
        decode_tensor(huge)


def test_image_chunk_is_refused() -> None:
    message = request()
    message.data[0].model_input[0].image.data = b"png"
    with pytest.raises(Malformed, match="datum 0: a chunk holds image"):
        decode_data(message)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3)).flatmap(
            lambda shape: arrays.arrays(np.float32, shape, elements=finite)
        )
        | st.integers(0, 5).flatmap(lambda n: arrays.arrays(np.float32, n, elements=finite)),
        min_size=1,
        max_size=6,
    )
)
def test_the_sdk_decodes_outputs_of_any_shapes_per_datum(outputs: list[np.ndarray]) -> None:
    body = encode_logprobs(outputs, {"loss:sum": 1.5})
    arrived = deserialize_forward_backward_output(body)
    assert arrived.metrics == {"loss:sum": 1.5}
    for one, output in zip(arrived.loss_fn_outputs, outputs, strict=True):
        assert np.array_equal(one["logprobs"].to_numpy(), output)


def test_consecutive_datums_of_one_shape_share_a_record() -> None:
    outputs = [np.ones(n, np.float32) for n in (3, 1, 4)]
    message = pb.ForwardBackwardOutput.FromString(encode_logprobs(outputs, {}))
    assert [record.num_datums for record in message.loss_fn_outputs] == [3]


def test_the_sdk_decodes_a_sample_response() -> None:
    result = SampleResult(
        sequences=[
            SampledSequence([5, 6], [-0.5, -0.25], "stop"),
            SampledSequence([7], [-1.0], "length"),
        ],
        prompt_logprobs=np.array([np.nan, -2.0], np.float32),
        topk_prompt_logprobs=(
            np.array([[0], [9]], np.int32),
            np.array([[-99999.0], [-0.125]], np.float32),
        ),
        cached_tokens=1,
    )
    arrived = deserialize_sample_response(encode_sample(result).SerializeToString())
    assert [sequence.tokens for sequence in arrived.sequences] == [[5, 6], [7]]
    assert [sequence.logprobs for sequence in arrived.sequences] == [[-0.5, -0.25], [-1.0]]
    assert [sequence.stop_reason for sequence in arrived.sequences] == ["stop", "length"]
    assert arrived.prompt_cache_hit_tokens == 1
    assert arrived.prompt_logprobs == [None, -2.0]
    assert arrived.topk_prompt_logprobs == [None, [(9, -0.125)]]
