"""What may be asked of sampling, what comes back, and how a token is drawn from logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from engine.errors import UserError

if TYPE_CHECKING:
    from engine.model import LanguageModel

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Tinker's sampling request. `stop` None: the model's end tokens; []: nothing stops it.

    top_k ≤ 0 means no limit. Without a seed one is drawn from the operating system.
    """

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0

    @property
    def stop_strings(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return [stop for stop in self.stop or () if isinstance(stop, str)]

    @property
    def stop_tokens(self) -> list[int] | None:
        """None where the model's own end tokens are meant."""
        if self.stop is None:
            return None
        return [stop for stop in self.stop if isinstance(stop, int)]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """A completion. `logprobs` are of the model's own distribution (temperature 1, nothing cut
    off), whatever the tokens were drawn with. A stop token is included."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """`prompt_logprobs` [T]: NaN first, for nothing predicts the first token.

    `topk_prompt_logprobs`: ids int32 and logprobs float32, both [T, K], most likely first; the
    first row, which nothing predicts, is 0 and -99999.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = field(default=None)


def check(request: SampleRequest, model: "LanguageModel") -> None:
    """Raises UserError where the request cannot be answered."""
    _check_prompt(request.prompt, model)
    if request.num_samples < 1:
        raise UserError(f"num_samples is {request.num_samples}; it must be 1 or more")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise UserError(f"max_tokens is {request.max_tokens}; it must be 1 or more")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise UserError(f"temperature is {request.temperature}; it must be 0 (greedy) or more")
    if not 0 < request.top_p <= 1:
        raise UserError(f"top_p is {request.top_p}; it must be above 0 and at most 1")
    if not 0 <= request.topk_prompt_logprobs <= model.vocab_size:
        raise UserError(
            f"topk_prompt_logprobs is {request.topk_prompt_logprobs}; "
            f"the vocabulary has {model.vocab_size} tokens"
        )
    if any(not stop for stop in request.stop_strings):
        raise UserError("an empty stop string would stop every completion; remove it")
    if request.stop_strings and request.stop_tokens:
        raise UserError("stop mixes strings and token ids; give one kind")


def _check_prompt(prompt: list[int], model: "LanguageModel") -> None:
    if not prompt:
        raise UserError("the prompt is empty; give it at least one token")
    if len(prompt) > model.max_context:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, but the context of {model.name} ends at "
            f"{model.max_context}; shorten it"
        )
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise UserError(
            f"the prompt has the token {wrong}, but {model.name} has the tokens 0 to "
            f"{model.vocab_size - 1}; was it encoded with another tokenizer?"
        )


@dataclass(frozen=True, slots=True)
class Choosing:
    """How each row of logits is turned into a token: arrays of one entry a row."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray
    """The row's number in [0, 1): the same number always chooses the same token."""


def choose(logits: torch.Tensor, how: Choosing) -> tuple[np.ndarray, np.ndarray]:
    """float32 logits [rows, vocabulary] → tokens int64, log-probabilities float32.

    Every operation here treats rows one by one, so a row's token does not depend on its companions.
    """
    logprobs = logits.log_softmax(-1)
    greedy = how.temperature < GREEDY_BELOW
    tokens = np.empty(len(logits), dtype=np.int64)
    if greedy.any():
        tokens[greedy] = logits.argmax(-1).cpu().numpy()[greedy]
    cut = ((how.top_k > 0) | (how.top_p < 1)) & ~greedy
    for rows, draw in ((~greedy & ~cut, _draw), (cut, _draw_filtered)):
        if rows.any():
            tokens[rows] = draw(_heated(logits, how.temperature, rows), how, rows)
    picked = torch.from_numpy(tokens).to(logits.device)[:, None]
    return tokens, logprobs.gather(1, picked)[:, 0].cpu().numpy()


def _heated(logits: torch.Tensor, temperature: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    """Some rows of the logits, over their temperature."""
    if not rows.all():
        logits = logits.index_select(0, torch.from_numpy(np.flatnonzero(rows)).to(logits.device))
    if (temperature[rows] == 1).all():
        return logits
    return logits / torch.from_numpy(temperature[rows]).to(logits.device, logits.dtype)[:, None]


def _draw(logits: torch.Tensor, how: Choosing, rows: np.ndarray) -> np.ndarray:
    return _inverse_cdf(logits.softmax(-1), how.uniform[rows])


def _draw_filtered(logits: torch.Tensor, how: Choosing, rows: np.ndarray) -> np.ndarray:
    """Keep the top_k most likely, of those the fewest that reach top_p, then draw."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    limits = torch.from_numpy(how.top_k[rows]).to(logits.device)
    limits = torch.where(limits > 0, limits, logits.shape[-1])
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    likely = ordered.masked_fill(ranks >= limits[:, None], float("-inf")).softmax(-1)
    before = likely.double().cumsum(-1) - likely
    enough = torch.from_numpy(how.top_p[rows]).to(logits.device)[:, None]
    # The first is always kept: nothing lies before it.
    likely = likely.masked_fill((before >= enough) & (ranks > 0), 0.0)
    place = torch.from_numpy(_inverse_cdf(likely, how.uniform[rows])).to(logits.device)
    return tokens.gather(1, place[:, None])[:, 0].cpu().numpy()


def _inverse_cdf(weights: torch.Tensor, uniform: np.ndarray) -> np.ndarray:
    """For each row the first column whose cumulated weight exceeds uniform · total."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    reached = torch.from_numpy(uniform).to(weights.device)[:, None] * cumulated[:, -1:]
    columns = torch.searchsorted(cumulated, reached, right=True)[:, 0]
    return columns.clamp_(max=weights.shape[-1] - 1).cpu().numpy()


def prompt_logprobs(logits: torch.Tensor, prompt: np.ndarray) -> np.ndarray:
    """Logits [T, vocabulary] of the prompt's positions → log-probability of each token [T]."""
    targets = torch.from_numpy(prompt[1:]).to(logits.device)[:, None]
    rows = logits[:-1]
    known = (rows.gather(1, targets)[:, 0] - rows.logsumexp(-1)).cpu().numpy()
    return np.concatenate([[np.nan], known]).astype(np.float32)


def topk_prompt_logprobs(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, vocabulary] → the k likeliest ids and their log-probabilities, each [T, k]."""
    rows = logits[:-1]
    values, ids = rows.topk(k, dim=-1)
    known = (values - rows.logsumexp(-1, keepdim=True)).cpu().numpy()
    first_ids = np.zeros((1, k), dtype=np.int32)
    first = np.full((1, k), -99999.0, dtype=np.float32)
    ids = ids.cpu().numpy().astype(np.int32)
    return np.concatenate([first_ids, ids]), np.concatenate([first, known.astype(np.float32)])
