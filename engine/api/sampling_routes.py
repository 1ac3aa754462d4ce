"""Routes of sampling sessions and sampling requests, and the options of their log-probabilities."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import tinker.types
from fastapi import APIRouter, Response
from tinker.proto import tinker_public_pb2 as pb

from ratchet.durable.wire.results import NO_LOGPROB, NO_TOKEN, STOPPED, encode_table
from ratchet.durable.wire.tensors import encode_tensor
from ratchet.engine.core import EngineCore, Submitted, TheEngine
from ratchet.engine.errors import RequestRefused
from ratchet.engine.futures import protobuf_answer
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.sampling.requests import SampleRequest, SampleResult, check_request
from ratchet.engine.state.checkpoints import CheckpointAddress
from ratchet.engine.state.registry import SamplerRecord

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: tinker.types.CreateSamplingSessionRequest, engine: TheEngine
) -> tinker.types.CreateSamplingSessionResponse:
    """Create a sampling session of the base model or saved weights, once if sent twice.

    Damaged weights are refused here, where a client can make them again, and not at its first call.
    """
    session = engine.registry.open_session(request.session_id)
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = _new_sampler(engine, sampler_id, request.base_model, request.model_path)
    if sampler.path is not None:
        address = CheckpointAddress.parse(sampler.path)
        await asyncio.to_thread(engine.checkpoints.folder, address)
    known = engine.registry.samplers.get(sampler_id)
    if known is None:
        engine.registry.samplers.put(sampler.sampler_id, sampler)
    elif known != sampler:
        raise RequestRefused(
            f"{sampler_id} exists and samples from {known.path or known.base_model}; give the next "
            "sampling_session_seq_id"
        )
    return tinker.types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


def _new_sampler(
    engine: EngineCore, sampler_id: str, base_model: str | None, model_path: str | None
) -> SamplerRecord:
    if base_model is not None:
        engine.check_base_model(base_model)
    elif model_path is None:
        raise RequestRefused("give a base_model or a model_path to sample from")
    return SamplerRecord(
        sampler_id=sampler_id,
        session_id=sampler_id.partition(":")[0],
        base_model=base_model or engine.base.name,
        weights="base" if model_path is None else "saved",
        path=None if model_path is None else str(engine.check_loadable(model_path)),
    )


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, engine: TheEngine) -> tinker.types.GetSamplerResponse:
    sampler = engine.registry.samplers.find(sampler_id)
    return tinker.types.GetSamplerResponse(
        sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.path
    )


@router.post("/asample")
async def sample(request: tinker.types.SampleRequest, engine: TheEngine) -> Submitted:
    if request.sampling_session_id is not None:
        sampler = engine.registry.samplers.find(request.sampling_session_id)
    else:
        sampler = _new_sampler(engine, "", request.base_model, request.model_path)
    decoded = _decode(request)
    check_request(decoded, engine.model)
    scored = read_options(request, decoded, engine.model.vocab_size)

    async def work() -> Response:
        lora = await engine.weights_of(sampler)
        return protobuf_answer(await answer_scored(engine, scored, lora))

    numbered = request.sampling_session_id is not None and request.seq_id is not None
    key = (sampler.sampler_id, request.seq_id) if numbered else None
    request_id = engine.futures.submit(work, key)
    ids = [f"{request_id}:{number}" for number in range(decoded.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


def _decode(request: tinker.types.SampleRequest) -> SampleRequest:
    for chunk in request.prompt.chunks:
        if not isinstance(chunk, tinker.types.EncodedTextChunk):
            raise RequestRefused(
                f"the prompt holds {chunk.type}; the model of this engine reads text"
            )
    params = request.sampling_params
    return SampleRequest(
        prompt=request.prompt.to_ints(),
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=params.stop,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
    )


LARGEST_TABLE = 2**25
"""Positions × vocabulary whose log-probabilities are in memory at once: 256 MB."""

NOT_COMPUTED = ("prompt_alt_tokens_k", "topk_sample_logprobs", "record_stability_info")


@dataclass(frozen=True, slots=True)
class ScoredRequest:
    """A sampling request, how many of the prompt's last tokens to score, and targets to score.

    `targets[i]` are token ids at the prompt's position i + 1; -1 is no token.
    """

    request: SampleRequest
    last_n: int | None
    targets: np.ndarray | None


def read_options(
    request: tinker.types.SampleRequest, decoded: SampleRequest, vocabulary: int
) -> ScoredRequest:
    """Add the options of an API request; raise RequestRefused for invalid options."""
    length, last_n = len(decoded.prompt), request.prompt_logprobs_last_n
    for name in NOT_COMPUTED:
        if getattr(request, name):
            raise RequestRefused(f"the engine computes no {name}; leave it unset")
    if last_n is not None and not (decoded.prompt_logprobs and 1 <= last_n < length):
        raise RequestRefused(
            f"prompt_logprobs_last_n is {last_n}; it needs prompt_logprobs and must be at least 1 "
            f"and less than the prompt's {length} tokens"
        )
    return ScoredRequest(decoded, last_n, _read_targets(request, length, vocabulary))


def _read_targets(
    request: tinker.types.SampleRequest, length: int, vocabulary: int
) -> np.ndarray | None:
    given = request.target_prompt_logprobs
    if given is None:
        return None
    shape = tuple(given.shape or ())
    if given.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise RequestRefused(
            f"target_prompt_logprobs is {given.dtype} of the shape {shape}; give int64 token ids "
            f"of the shape ({length - 1}, K), a row for each position after the first"
        )
    try:
        ids = np.array(given.data, dtype=np.int64).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise RequestRefused(f"target_prompt_logprobs, which are dense: {error}") from error
    if not (ids >= 0).any() or ids.min() < -1 or ids.max() >= vocabulary:
        raise RequestRefused(
            f"target_prompt_logprobs must name a token, and only tokens from 0 to {vocabulary - 1}"
        )
    if length * vocabulary > LARGEST_TABLE:
        raise RequestRefused(
            f"target_prompt_logprobs need the distributions over {vocabulary} tokens at {length} "
            "positions, more than the engine holds at once; shorten the prompt"
        )
    return ids


async def answer_scored(
    engine: EngineCore, scored: ScoredRequest, lora: LoraWeights | None
) -> bytes:
    """Sample, look up the requested log-probabilities, and encode the response."""
    request, targets = scored.request, scored.targets
    if targets is not None:
        request = replace(request, topk_prompt_logprobs=engine.model.vocab_size)
    result = await asyncio.wrap_future(engine.scheduler.sample(request, lora))
    message = encode_sample(_trim(result, scored))
    if targets is not None:
        assert result.topk_prompt_logprobs is not None
        ids, logprobs = result.topk_prompt_logprobs  # [T, V], likeliest first
        table = np.empty_like(logprobs)
        np.put_along_axis(table, ids.astype(np.int64), logprobs, axis=1)
        found = np.take_along_axis(table[1:], np.maximum(targets, 0), axis=1)
        scores = np.where(targets >= 0, found, np.float32(0))
        message.target_prompt_logprobs.CopyFrom(encode_tensor(scores))
    return message.SerializeToString()


def _trim(result: SampleResult, scored: ScoredRequest) -> SampleResult:
    """Keep the requested top-k columns and the scores of the last n tokens."""
    k, unscored = scored.request.topk_prompt_logprobs, 0
    if scored.last_n is not None:
        unscored = len(scored.request.prompt) - scored.last_n
    prompt, topk = result.prompt_logprobs, result.topk_prompt_logprobs
    if prompt is not None:
        prompt = prompt.copy()
        prompt[:unscored] = np.nan
    if topk is not None:
        ids, logprobs = topk[0][:, :k].copy(), topk[1][:, :k].copy()
        ids[:unscored], logprobs[:unscored] = NO_TOKEN, NO_LOGPROB
        topk = (ids, logprobs) if k else None
    return replace(result, prompt_logprobs=prompt, topk_prompt_logprobs=topk)


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
