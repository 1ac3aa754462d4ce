"""Messages of the API in protobuf and in JSON: each says what the other does."""

import json
from math import isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from ratchet.durable.wire.datums import BACKWARD, FORWARD, to_json
from ratchet.durable.wire.results import (
    LOSS,
    NO_LOGPROB,
    add_loss,
    complete_prompt,
    decode_losses,
    encode_losses,
    encode_table,
    losses_from_json,
    sample_from_json,
)
from ratchet.durable.wire.tensors import Malformed, encode_tensor, read_json, write_json
from tests.support.servers.older_server import from_json, losses_to_json, sample_to_json

shapes = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)
floats = shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape))
numbers = shapes.flatmap(
    lambda shape: arrays.arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=False))
)
integers = shapes.flatmap(lambda shape: arrays.arrays(np.int64, shape))
scores = st.floats(-9e4, 0, width=32)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def sent(written: dict[str, Any]) -> dict[str, Any]:
    """Return what arrives of a body in JSON."""
    return json.loads(json.dumps(written))


@given(floats | integers)
def test_a_tensor_in_json_is_the_same_to_the_last_bit(values: np.ndarray) -> None:
    arrived = read_json(sent(write_json(values)))
    assert (arrived.dtype, arrived.shape) == (values.dtype, values.shape)
    assert np.array_equal(arrived, values, equal_nan=arrived.dtype.kind == "f")


@st.composite
def requests(draw: st.DrawFn) -> pb.ForwardBackwardRequest:
    made = pb.ForwardBackwardRequest(
        model_id=draw(st.text(min_size=1, max_size=8)),
        seq_id=draw(st.integers(0, 2**31 - 1)),
        loss_fn=draw(st.sampled_from(["cross_entropy", "ppo"])),
        forward_only=draw(st.booleans()),
    )
    for name, value in draw(st.dictionaries(st.sampled_from(["a", "b"]), scores)).items():
        made.loss_fn_config[name] = value
        made.loss_fn_config_v2[name].number = value
    for _ in range(draw(st.integers(0, 3))):
        datum = made.data.add()
        text = datum.model_input.add()
        text.encoded_text.tokens = np.array(draw(tokens), np.int32).tobytes()
        if draw(st.booleans()):
            image = datum.model_input.add().image
            image.data, image.format = draw(st.binary(max_size=5)), "png"
        for name in draw(st.sets(st.sampled_from(["target_tokens", "weights"]))):
            datum.loss_fn_inputs[name].CopyFrom(encode_tensor(draw(numbers | integers)))
    return made


@given(requests())
def test_a_request_in_json_is_read_as_the_one_in_protobuf(made: pb.ForwardBackwardRequest) -> None:
    written = sent(to_json(made))
    assert (FORWARD if made.forward_only else BACKWARD) in written
    assert from_json(written) == pb.ForwardBackwardRequest.FromString(made.SerializeToString())


def test_what_json_has_no_field_of_is_refused_by_name() -> None:
    made = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    made.loss_fn_config_v2["mode"].text = "soft"
    with pytest.raises(Malformed, match="'mode' is a text"):
        to_json(made)
    made = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    made.data.add().model_input.add().dmel.dmel = b"sound"
    with pytest.raises(Malformed, match="datum 0: a chunk holds dmel"):
        to_json(made)
    made = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    made.data.add().model_input_spans.add()
    with pytest.raises(Malformed, match="spans"):
        to_json(made)


fields = st.fixed_dictionaries(
    {
        "logprobs": arrays.arrays(np.float32, st.integers(0, 4), elements=scores),
        "places": arrays.arrays(np.int64, st.integers(0, 4)),
    }
)


@given(st.lists(fields, max_size=4), st.dictionaries(st.sampled_from(["a:mean", LOSS]), scores))
def test_losses_in_json_are_read_as_those_in_protobuf(
    outputs: list[dict[str, np.ndarray]], metrics: dict[str, float]
) -> None:
    message = encode_losses(outputs, metrics)
    arrived = losses_from_json(sent(losses_to_json(message)))
    assert arrived == message
    assert len(decode_losses(arrived)) == len(outputs)
    read = deserialize_forward_backward_output(arrived.SerializeToString())
    for told, output in zip(read.loss_fn_outputs, outputs, strict=True):
        for name, values in output.items():
            assert np.array_equal(told[name].to_numpy(), values)


@st.composite
def samples(draw: st.DrawFn) -> pb.SampleResponse:
    message = pb.SampleResponse(prompt_cache_hit_tokens=draw(st.integers(0, 9)))
    for drawn in draw(st.lists(tokens, max_size=3)):
        given_scores = draw(st.lists(scores, min_size=len(drawn), max_size=len(drawn)))
        message.sequences.add(
            stop_reason=draw(st.sampled_from([pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH])),
            tokens=np.array(drawn, np.int32).tobytes(),
            logprobs=np.array(given_scores, np.float32).tobytes(),
        )
    length = draw(st.integers(1, 5))
    prompt = [nan, *draw(st.lists(scores, min_size=length - 1, max_size=length - 1))]
    if draw(st.booleans()):
        message.prompt_logprobs = np.array(prompt, np.float32).tobytes()
    if draw(st.booleans()):
        table = np.array([[NO_LOGPROB, NO_LOGPROB], *[[-1.0, -2.0]] * (length - 1)], np.float32)
        ids = np.array([[0, 0], *[[7, 8]] * (length - 1)], np.int32)
        message.topk_prompt_logprobs.CopyFrom(encode_table(ids, table))
    return message


@given(samples())
def test_a_sample_in_json_is_read_as_the_one_in_protobuf(message: pb.SampleResponse) -> None:
    arrived = sample_from_json(sent(sample_to_json(message)))
    ours, theirs = (
        deserialize_sample_response(one.SerializeToString()) for one in (arrived, message)
    )
    assert [one.stop_reason for one in ours.sequences] == [
        one.stop_reason for one in theirs.sequences
    ]
    assert [one.tokens for one in ours.sequences] == [one.tokens for one in theirs.sequences]
    assert [one.logprobs for one in ours.sequences] == [one.logprobs for one in theirs.sequences]
    assert ours.prompt_logprobs == theirs.prompt_logprobs
    known = theirs.topk_prompt_logprobs
    assert ours.topk_prompt_logprobs == known or (known and not any(known))
    assert ours.prompt_cache_hit_tokens == theirs.prompt_cache_hit_tokens


def test_a_reason_to_stop_that_nobody_knows_is_refused_by_name() -> None:
    answer = {"sequences": [{"stop_reason": "bored", "tokens": [1], "logprobs": [-1.0]}]}
    with pytest.raises(Malformed, match="bored"):
        sample_from_json(answer)


def test_a_prompt_that_lacks_its_first_place_gets_it() -> None:
    message = pb.SampleResponse(prompt_logprobs=np.array([-1.0, -2.0], np.float32).tobytes())
    ids, table = np.array([[3], [4]], np.int32), np.array([[-1.0], [-2.0]], np.float32)
    message.topk_prompt_logprobs.CopyFrom(encode_table(ids, table))
    complete_prompt(message, 3)
    complete_prompt(message, 3)  # which is whole now
    read = deserialize_sample_response(message.SerializeToString())
    assert read.prompt_logprobs == [None, -1.0, -2.0]
    assert read.topk_prompt_logprobs == [None, [(3, -1.0)], [(4, -2.0)]]


def test_a_loss_that_is_not_told_is_the_sum_by_tokens_or_not_known() -> None:
    by_tokens = [{"elementwise_loss": np.array([0.5, 0.25], np.float32)}]
    told, untold = encode_losses(by_tokens, {}), encode_losses([{"logprobs": np.ones(1)}], {})
    add_loss(told)
    add_loss(untold)
    assert told.metrics[LOSS] == 0.75
    assert isnan(untold.metrics[LOSS])
    known = encode_losses([], {LOSS: 2.0})
    add_loss(known)
    assert known.metrics[LOSS] == 2.0
