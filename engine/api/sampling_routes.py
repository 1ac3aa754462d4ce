"""Routes of sampling sessions and sampling requests, and the options of their log-probabilities.

The options are suffixes, targets, alternatives and top-k. All are computed from the k likeliest
tokens of every position, with k up to the whole vocabulary.
"""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import tinker.types
from fastapi import APIRouter, Response
from tinker.proto import tinker_public_pb2 as pb

from ratchet.durable.wire.results import NO_LOGPROB, NO_TOKEN, Table, encode_table
from ratchet.durable.wire.tensors import csr_rows, encode_tensor
from ratchet.engine.api.conversion import Submitted, TheEngine, encode_sample
from ratchet.engine.core import EngineCore
from ratchet.engine.errors import RequestRefused
from ratchet.engine.futures import protobuf_answer
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.randomness import entropy
from ratchet.engine.sampling.requests import (
    GREEDY_BELOW,
    SampleRequest,
    SampleResult,
    check_request,
)
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


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens to score: `ids[i]` at the prompt's position `rows[i] + 1`; the id -1 is skipped."""

    rows: np.ndarray
    ids: np.ndarray
    layout: pb.Tensor

    def score(self, table: np.ndarray) -> pb.Tensor:
        """Return log-probabilities in the layout of the request, 0 at skipped ids."""
        asked = self.ids >= 0
        values = np.where(asked, table[self.rows + 1, np.where(asked, self.ids, 0)], 0.0)
        answer = pb.Tensor()
        answer.CopyFrom(self.layout)
        if answer.HasField("sparse_csr"):
            answer.sparse_csr.values = values.astype(np.float32).tobytes()
        else:
            answer.dense = values.astype(np.float32).tobytes()
        return answer


@dataclass(frozen=True, slots=True)
class ScoredRequest:
    """A sampling request, with its log-probability options as the API has them."""

    request: SampleRequest
    options: tinker.types.SampleRequest
    targets: Targets | None

    @property
    def needs_table(self) -> bool:
        return self.targets is not None or self.options.prompt_alt_tokens_k > 0


def read_options(
    request: tinker.types.SampleRequest, decoded: SampleRequest, vocabulary: int
) -> ScoredRequest:
    """Add the options of an API request; raise RequestRefused for invalid options."""
    length = len(decoded.prompt)
    last_n = request.prompt_logprobs_last_n
    if request.record_stability_info:
        raise RequestRefused(
            "the engine records no stability information, because it has no stable_reinforce; "
            "leave record_stability_info unset"
        )
    if last_n is not None and not (decoded.prompt_logprobs and 1 <= last_n < length):
        raise RequestRefused(
            f"prompt_logprobs_last_n is {last_n}; it needs prompt_logprobs and must be at least 1 "
            f"and less than the prompt's {length} tokens"
        )
    for name in ("prompt_alt_tokens_k", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= vocabulary:
            raise RequestRefused(
                f"{name} is {getattr(request, name)}; give a number from 0 to the size of the "
                f"vocabulary, {vocabulary}"
            )
    scored = ScoredRequest(decoded, request, _read_targets(request, length, vocabulary))
    width = max(vocabulary, request.prompt_alt_tokens_k)
    if scored.needs_table and length * width > LARGEST_TABLE:
        raise RequestRefused(
            f"target_prompt_logprobs and prompt_alt_tokens_k need the distributions over "
            f"{vocabulary} tokens at {length} positions, more than the engine holds at once; "
            "shorten the prompt"
        )
    return scored


def _read_targets(
    request: tinker.types.SampleRequest, length: int, vocabulary: int
) -> Targets | None:
    given = request.target_prompt_logprobs
    if given is None:
        return None
    shape = tuple(given.shape or ())
    if given.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise RequestRefused(
            f"target_prompt_logprobs is {given.dtype} of the shape {shape}; give int64 token ids "
            f"of the shape ({length - 1}, K), a row for each position after the first"
        )
    ids = _integers(given.data)
    layout = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
    if given.sparse_crow_indices is None:
        if ids.size != shape[0] * shape[1]:
            raise RequestRefused(
                f"target_prompt_logprobs: {ids.size} ids do not fill the shape {shape}"
            )
        rows = np.repeat(np.arange(shape[0]), shape[1])
    else:
        starts = _integers(given.sparse_crow_indices)
        columns = _integers(given.sparse_col_indices or [])
        rows = csr_rows(starts, columns, ids.size, shape)
        layout.sparse_csr.crow_indices = starts.tobytes()
        layout.sparse_csr.col_indices = columns.tobytes()
    if not (ids >= 0).any() or ids.min() < -1 or ids.max() >= vocabulary:
        raise RequestRefused(
            f"target_prompt_logprobs must name a token, and only tokens from 0 to {vocabulary - 1}"
        )
    return Targets(rows, ids, layout)


def _integers(values: list[int] | list[float]) -> np.ndarray:
    try:
        return np.array(values, dtype=np.int64)
    except (OverflowError, ValueError) as error:
        raise RequestRefused(f"target_prompt_logprobs: {error}") from error


async def answer_scored(
    engine: EngineCore, scored: ScoredRequest, lora: LoraWeights | None
) -> bytes:
    """Sample, look up the requested log-probabilities, and encode the response."""
    request = scored.request
    if scored.needs_table:
        request = replace(request, topk_prompt_logprobs=engine.model.vocab_size)
    result = await asyncio.wrap_future(engine.scheduler.sample(request, lora))
    message = encode_sample(_trim(result, scored))
    if scored.needs_table:
        assert result.topk_prompt_logprobs is not None
        ids, logprobs = result.topk_prompt_logprobs  # [T, V], likeliest first
        table = np.empty_like(logprobs)
        np.put_along_axis(table, ids.astype(np.int64), logprobs, axis=1)
        _add_scores(message, scored, table)
    if scored.options.topk_sample_logprobs:
        tables = await _score_sampled(engine, scored, result, lora)
        for sequence, table in zip(message.sequences, tables, strict=True):
            sequence.topk_sampled_logprobs.CopyFrom(encode_table(*table))
    return message.SerializeToString()


def _add_scores(message: pb.SampleResponse, scored: ScoredRequest, table: np.ndarray) -> None:
    """Add what is asked of the table, the log-probabilities [T, V] by token id."""
    if scored.targets is not None:
        message.target_prompt_logprobs.CopyFrom(scored.targets.score(table))
    if scored.options.prompt_alt_tokens_k:
        tokens, logprobs = _draw_alternatives(table, scored)
        message.prompt_alt_tokens.tokens.CopyFrom(encode_tensor(tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(encode_tensor(logprobs))


def _draw_alternatives(table: np.ndarray, scored: ScoredRequest) -> Table:
    """Draw tokens at every position after the first, at the request's temperature.

    The draws use the Gumbel-max trick: the argmax of logits + Gumbel draws is a draw from the
    softmax of the logits.
    """
    request, count = scored.request, scored.options.prompt_alt_tokens_k
    logprobs = table[1:].astype(np.float64)
    if request.temperature < GREEDY_BELOW:
        tokens = np.repeat(logprobs.argmax(1)[:, None], count, axis=1)
    else:
        random = np.random.default_rng(entropy() if request.seed is None else abs(request.seed))
        logits = logprobs / request.temperature
        draws = [(logits + random.gumbel(size=logits.shape)).argmax(1) for _ in range(count)]
        tokens = np.stack(draws, axis=1)
    return tokens, np.take_along_axis(logprobs, tokens, axis=1)


async def _score_sampled(
    engine: EngineCore, scored: ScoredRequest, result: SampleResult, lora: LoraWeights | None
) -> list[Table]:
    """Read each completion after its prompt, and return the top-k rows of its tokens."""
    prompt, k = scored.request.prompt, scored.options.topk_sample_logprobs
    read = [
        engine.scheduler.sample(
            SampleRequest(prompt + one.tokens, max_tokens=1, topk_prompt_logprobs=k), lora
        )
        for one in result.sequences
    ]
    tables = []
    for table in await asyncio.gather(*map(asyncio.wrap_future, read)):
        assert table.topk_prompt_logprobs is not None
        ids, logprobs = table.topk_prompt_logprobs
        tables.append((ids[len(prompt) :], logprobs[len(prompt) :]))
    return tables


def _trim(result: SampleResult, scored: ScoredRequest) -> SampleResult:
    """Keep the requested top-k columns and the scores of the last n tokens."""
    k, unscored = scored.request.topk_prompt_logprobs, 0
    if scored.options.prompt_logprobs_last_n is not None:
        unscored = len(scored.request.prompt) - scored.options.prompt_logprobs_last_n
    prompt, topk = result.prompt_logprobs, result.topk_prompt_logprobs
    if prompt is not None:
        prompt = prompt.copy()
        prompt[:unscored] = np.nan
    if topk is not None:
        ids, logprobs = topk[0][:, :k].copy(), topk[1][:, :k].copy()
        ids[:unscored], logprobs[:unscored] = NO_TOKEN, NO_LOGPROB
        topk = (ids, logprobs) if k else None
    return replace(result, prompt_logprobs=prompt, topk_prompt_logprobs=topk)
