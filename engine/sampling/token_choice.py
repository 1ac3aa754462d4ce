"""Choice of tokens from logits, and log-probabilities of prompts."""

import numpy as np
import torch

from engine.sampling.requests import GREEDY_BELOW


def choose_tokens(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniform: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token from each row of float32 logits [rows, vocabulary].

    The arrays have one entry a row: the row's parameters, and a random number in [0, 1), of which
    the same number always chooses the same token. Return tokens int64 and log-probabilities
    float32. Every operation treats rows one by one, so a row's token does not depend on the others.
    """
    logprobs = logits.log_softmax(-1)
    greedy = temperature < GREEDY_BELOW
    tokens = np.empty(len(logits), dtype=np.int64)
    if greedy.any():
        tokens[greedy] = logits.argmax(-1).cpu().numpy()[greedy]
    filtered = ((top_k > 0) | (top_p < 1)) & ~greedy
    if (rows := ~greedy & ~filtered).any():
        scaled = _divide_by_temperature(logits, temperature, rows)
        tokens[rows] = _inverse_cdf(scaled.softmax(-1), uniform[rows])
    if filtered.any():
        scaled = _divide_by_temperature(logits, temperature, filtered)
        tokens[filtered] = _draw_filtered(
            scaled, top_k[filtered], top_p[filtered], uniform[filtered]
        )
    picked = torch.from_numpy(tokens).to(logits.device)[:, None]
    return tokens, logprobs.gather(1, picked)[:, 0].cpu().numpy()


def _divide_by_temperature(
    logits: torch.Tensor, temperature: np.ndarray, rows: np.ndarray
) -> torch.Tensor:
    """Select rows of the logits and divide each by its temperature."""
    if not rows.all():
        logits = logits.index_select(0, torch.from_numpy(np.flatnonzero(rows)).to(logits.device))
    if (temperature[rows] == 1).all():
        return logits
    return logits / torch.from_numpy(temperature[rows]).to(logits.device, logits.dtype)[:, None]


def _draw_filtered(
    logits: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """Keep the top_k most likely tokens, of those the fewest that reach top_p, then draw."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    limits = torch.from_numpy(top_k).to(logits.device)
    limits = torch.where(limits > 0, limits, logits.shape[-1])
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    likely = ordered.masked_fill(ranks >= limits[:, None], float("-inf")).softmax(-1)
    before = likely.double().cumsum(-1) - likely
    enough = torch.from_numpy(top_p).to(logits.device)[:, None]
    # The most likely token is always kept.
    likely = likely.masked_fill((before >= enough) & (ranks > 0), 0.0)
    place = torch.from_numpy(_inverse_cdf(likely, uniform)).to(logits.device)
    return tokens.gather(1, place[:, None])[:, 0].cpu().numpy()


def _inverse_cdf(weights: torch.Tensor, uniform: np.ndarray) -> np.ndarray:
    """Return for each row the first column whose cumulative weight exceeds uniform · total."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    reached = torch.from_numpy(uniform).to(weights.device)[:, None] * cumulated[:, -1:]
    columns = torch.searchsorted(cumulated, reached, right=True)[:, 0]
    return columns.clamp_(max=weights.shape[-1] - 1).cpu().numpy()


def prompt_logprobs(logits: torch.Tensor, prompt: np.ndarray) -> np.ndarray:
    """Return each prompt token's log-probability [T], from the logits [T, vocabulary]."""
    targets = torch.from_numpy(prompt[1:]).to(logits.device)[:, None]
    rows = logits[:-1]
    known = (rows.gather(1, targets)[:, 0] - rows.logsumexp(-1)).cpu().numpy()
    return np.concatenate([[np.nan], known]).astype(np.float32)


def topk_prompt_logprobs(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k likeliest ids and their log-probabilities, each [T, k]."""
    rows = logits[:-1]
    values, ids = rows.topk(k, dim=-1)
    known = (values - rows.logsumexp(-1, keepdim=True)).cpu().numpy()
    first_ids = np.zeros((1, k), dtype=np.int32)
    first = np.full((1, k), -99999.0, dtype=np.float32)
    ids = ids.cpu().numpy().astype(np.int32)
    return np.concatenate([first_ids, ids]), np.concatenate([first, known.astype(np.float32)])
