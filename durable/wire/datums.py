"""Datums with their loss, as `forward_backward` sends them: protobuf, or JSON up to SDK 0.24."""

import base64
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from ratchet.durable.wire.tensors import Malformed, decode_tensor, locating, read_array, write_json

FORWARD, BACKWARD = "forward_input", "forward_backward_input"
"""Keys of the datums in JSON, by which a forward pass is told from one with a gradient."""
TOKENS = np.dtype(np.int32)


def decode_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    config: dict[str, float | str] = {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    return config or dict(message.loss_fn_config)


def check_older(message: pb.ForwardBackwardRequest) -> None:
    """Raise Malformed for what the wire up to SDK 0.25 has no field of."""
    texts = [name for name, value in decode_config(message).items() if isinstance(value, str)]
    if texts:
        raise Malformed(f"loss_fn_config {texts[0]!r} is a text; give a number")
    if any(datum.model_input_spans or datum.loss_fn_input_spans for datum in message.data):
        raise Malformed("the datums say from which samples their tokens are; leave the spans out")


def to_json(message: pb.ForwardBackwardRequest) -> dict[str, Any]:
    """Write the message as the body of `forward` or of `forward_backward` in JSON."""
    check_older(message)
    data = []
    for position, datum in enumerate(message.data):
        with locating(f"datum {position}"):
            data.append(_datum_to_json(datum))
    given = {
        "data": data,
        "loss_fn": message.loss_fn,
        "loss_fn_config": decode_config(message) or None,
    }
    key = FORWARD if message.forward_only else BACKWARD
    return {"model_id": message.model_id, "seq_id": message.seq_id or None, key: given}


def _datum_to_json(datum: pb.Datum) -> dict[str, Any]:
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        with locating(f"loss_fn_inputs[{name!r}]"):
            inputs[name] = write_json(decode_tensor(tensor))
    chunks = [_chunk_to_json(chunk) for chunk in datum.model_input]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _chunk_to_json(chunk: pb.Chunk) -> dict[str, Any]:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = read_array(chunk.encoded_text.tokens, TOKENS)
        return {"type": kind, "tokens": tokens.tolist()}
    if kind == "image":
        image = chunk.image
        data = base64.b64encode(image.data).decode()
        written: dict[str, Any] = {"type": kind, "data": data, "format": image.format}
        if image.HasField("expected_tokens"):
            written["expected_tokens"] = image.expected_tokens
        return written
    raise Malformed(f"a chunk holds {kind or 'nothing'}; send text or images")
