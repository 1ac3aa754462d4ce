"""What the routes share: the engine, and messages of the Tinker API as what it computes on."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from fastapi import Depends, Query, Request
from tinker.proto import tinker_public_pb2 as pb

from ratchet.durable.wire.datums import TOKENS
from ratchet.durable.wire.results import STOPPED, encode_losses, encode_table
from ratchet.durable.wire.tensors import Malformed, decode_tensor, locating, read_array
from ratchet.engine.core import EngineCore
from ratchet.engine.errors import RequestRefused
from ratchet.engine.sampling.requests import SampleResult
from ratchet.engine.training.datums import TrainingDatum


def decode_data(message: pb.ForwardBackwardRequest) -> list[TrainingDatum]:
    """Check every tensor and make it dense: float32 or int64, of its declared shape."""
    if not message.data:
        raise RequestRefused("no data to compute a loss on; give at least one datum")
    return [_decode_datum(position, datum) for position, datum in enumerate(message.data)]


def _decode_datum(position: int, datum: pb.Datum) -> TrainingDatum:
    inputs: dict[str, np.ndarray] = {}
    with locating(f"datum {position}"):
        chunks = [_read_tokens(chunk) for chunk in datum.model_input]
        for name, tensor in datum.loss_fn_inputs.items():
            with locating(f"loss_fn_inputs[{name!r}]"):
                inputs[name] = decode_tensor(tensor)
    tokens = np.concatenate(chunks) if chunks else np.empty(0, TOKENS)
    return TrainingDatum(tokens, inputs)


def _read_tokens(chunk: pb.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise Malformed(f"a chunk holds {kind or 'nothing'}; the model of this engine reads text")
    return read_array(chunk.encoded_text.tokens, TOKENS)


def encode_logprobs(outputs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode the log-probabilities of each datum's targets."""
    message = encode_losses([{"logprobs": output} for output in outputs], metrics)
    return message.SerializeToString()


def encode_sample(result: SampleResult) -> pb.SampleResponse:
    message = pb.SampleResponse(
        sequences=[
            pb.SampledSequence(
                stop_reason=STOPPED[one.stop_reason],
                tokens=np.asarray(one.tokens, np.int32).tobytes(),
                logprobs=np.asarray(one.logprobs, np.float32).tobytes(),
            )
            for one in result.sequences
        ],
        prompt_cache_hit_tokens=result.cached_tokens,
    )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(encode_table(*result.topk_prompt_logprobs))
    return message


Limit = Annotated[int, Query(ge=0)]
Submitted = dict[str, object]


async def _engine(request: Request) -> EngineCore:
    return request.app.state.engine


TheEngine = Annotated[EngineCore, Depends(_engine)]
