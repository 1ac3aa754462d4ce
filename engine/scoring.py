"""The rarer questions of a sampling request: suffixes, chosen tokens, alternatives, top-k sampled.

They are answered from what the sampler already gives: the k likeliest tokens of every position,
with k up to the whole vocabulary.
"""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import tinker.types
from tinker.proto import tinker_public_pb2 as pb

from engine import wire
from engine.core import Engine, awaited
from engine.errors import UserError
from engine.lora import Lora
from engine.randomness import entropy
from engine.sampling import GREEDY_BELOW, SampleRequest, SampleResult

LARGEST_TABLE = 2**25
"""Positions × vocabulary whose log-probabilities are held at once: 256 MB of ids and values."""

NO_TOKEN, NO_LOGPROB = 0, -99999.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens to score: `ids[i]` at the prompt's position `rows[i] + 1`; -1 asks nothing."""

    rows: np.ndarray
    ids: np.ndarray
    layout: pb.Tensor

    def scored(self, table: np.ndarray) -> pb.Tensor:
        """In the layout of the request, 0 where nothing was asked."""
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
class Question:
    """A sampling request, and what it asks besides."""

    asked: SampleRequest
    last_n: int | None = None
    targets: Targets | None = None
    alternatives: int = 0
    topk_sampled: int = 0

    @property
    def needs_table(self) -> bool:
        return self.targets is not None or self.alternatives > 0


def question(
    request: tinker.types.SampleRequest, asked: SampleRequest, vocabulary: int
) -> Question:
    """Raises UserError where what is asked besides cannot be answered."""
    length = len(asked.prompt)
    last_n = request.prompt_logprobs_last_n
    if request.record_stability_info:
        raise UserError("the engine records no stability information; it has no stable_reinforce")
    if last_n is not None and not (asked.prompt_logprobs and 1 <= last_n < length):
        raise UserError(
            f"prompt_logprobs_last_n is {last_n}; it needs prompt_logprobs and must be at least 1 "
            f"and less than the prompt's {length} tokens"
        )
    for name in ("prompt_alt_tokens_k", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= vocabulary:
            raise UserError(f"{name} is {getattr(request, name)}; the vocabulary is {vocabulary}")
    made = Question(
        asked=asked,
        last_n=last_n,
        targets=_targets(request, length, vocabulary),
        alternatives=request.prompt_alt_tokens_k,
        topk_sampled=request.topk_sample_logprobs,
    )
    if made.needs_table and length * max(vocabulary, made.alternatives) > LARGEST_TABLE:
        raise UserError(
            f"target_prompt_logprobs and prompt_alt_tokens_k need the distributions over "
            f"{vocabulary} tokens at {length} positions, more than the engine holds at once; "
            "shorten the prompt"
        )
    return made


def _targets(request: tinker.types.SampleRequest, length: int, vocabulary: int) -> Targets | None:
    given = request.target_prompt_logprobs
    if given is None:
        return None
    shape = tuple(given.shape or ())
    if given.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise UserError(
            f"target_prompt_logprobs is {given.dtype} of the shape {shape}; give int64 token ids "
            f"of the shape ({length - 1}, K), a row for each position after the first"
        )
    ids = _integers(given.data)
    layout = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
    if given.sparse_crow_indices is None:
        if ids.size != shape[0] * shape[1]:
            raise UserError(f"target_prompt_logprobs: {ids.size} ids do not fill the shape {shape}")
        rows = np.repeat(np.arange(shape[0]), shape[1])
    else:
        starts = _integers(given.sparse_crow_indices)
        columns = _integers(given.sparse_col_indices or [])
        rows = wire.csr_rows(starts, columns, ids.size, shape)
        layout.sparse_csr.crow_indices = starts.tobytes()
        layout.sparse_csr.col_indices = columns.tobytes()
    if not (ids >= 0).any() or ids.min() < -1 or ids.max() >= vocabulary:
        raise UserError(
            f"target_prompt_logprobs must name a token, and only tokens from 0 to {vocabulary - 1}"
        )
    return Targets(rows, ids, layout)


def _integers(values: list[int] | list[float]) -> np.ndarray:
    try:
        return np.array(values, dtype=np.int64)
    except (OverflowError, ValueError) as error:
        raise UserError(f"target_prompt_logprobs: {error}") from error


async def answer(engine: Engine, question: Question, lora: Lora | None) -> bytes:
    """Sample, then look up what was asked besides."""
    asked = question.asked
    vocabulary = engine.model.vocab_size
    if question.needs_table:
        asked = replace(asked, topk_prompt_logprobs=vocabulary)
    result = await awaited(engine.scheduler.sample(asked, lora))
    targets, alternatives, topk_sampled = None, None, None
    if question.needs_table:
        assert result.topk_prompt_logprobs is not None
        table = _by_token(*result.topk_prompt_logprobs)
        targets = question.targets.scored(table) if question.targets else None
        alternatives = _alternatives(table, question) if question.alternatives else None
    if question.topk_sampled:
        topk_sampled = await _topk_sampled(engine, question, result, lora)
    extras = wire.Extras(topk_sampled, targets, alternatives)
    return wire.sample_response(_trimmed(result, question), extras)


def _by_token(ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """[T, V] sorted by probability → [T, V] with the log-probability of token v in column v."""
    table = np.empty_like(logprobs)
    np.put_along_axis(table, ids.astype(np.int64), logprobs, axis=1)
    return table


def _alternatives(table: np.ndarray, question: Question) -> wire.Table:
    """Independent draws at every position after the first, at the request's temperature.

    By the Gumbel-max trick: the largest of logit + Gumbel noise is a draw from their softmax.
    """
    asked = question.asked
    logprobs = table[1:].astype(np.float64)
    shape = (len(logprobs), question.alternatives)
    if asked.temperature < GREEDY_BELOW:
        tokens = np.repeat(logprobs.argmax(1)[:, None], question.alternatives, axis=1)
    else:
        random = np.random.default_rng(entropy() if asked.seed is None else abs(asked.seed))
        heated = logprobs / asked.temperature
        tokens = np.empty(shape, dtype=np.int64)
        for draw in range(question.alternatives):
            tokens[:, draw] = (heated + random.gumbel(size=heated.shape)).argmax(1)
    return tokens, np.take_along_axis(logprobs, tokens, axis=1)


async def _topk_sampled(
    engine: Engine, question: Question, result: SampleResult, lora: Lora | None
) -> list[wire.Table]:
    """Read each completion after its prompt, and keep the rows of its tokens."""
    prompt, k = question.asked.prompt, question.topk_sampled
    read = [
        engine.scheduler.sample(
            SampleRequest(prompt + one.tokens, max_tokens=1, topk_prompt_logprobs=k), lora
        )
        for one in result.sequences
    ]
    tables = []
    for table in await asyncio.gather(*map(awaited, read)):
        assert table.topk_prompt_logprobs is not None
        ids, logprobs = table.topk_prompt_logprobs
        tables.append((ids[len(prompt) :], logprobs[len(prompt) :]))
    return tables


def _trimmed(result: SampleResult, question: Question) -> SampleResult:
    """Only as many top-k columns as were asked, and nothing before the last n tokens."""
    k, unscored = question.asked.topk_prompt_logprobs, 0
    if question.last_n is not None:
        unscored = len(question.asked.prompt) - question.last_n
    prompt, topk = result.prompt_logprobs, result.topk_prompt_logprobs
    if prompt is not None:
        prompt = prompt.copy()
        prompt[:unscored] = np.nan
    if topk is not None:
        ids, logprobs = topk[0][:, :k].copy(), topk[1][:, :k].copy()
        ids[:unscored], logprobs[:unscored] = NO_TOKEN, NO_LOGPROB
        topk = (ids, logprobs) if k else None
    return SampleResult(result.sequences, prompt, topk)
