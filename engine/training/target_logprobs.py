"""Log-probabilities of targets under logits, computed a few rows at a time with their gradients."""

from typing import Any

import torch
from torch.nn import functional as F

LOGITS_AT_ONCE = 2**18
"""Logits that a few operations compute one after another: a processor's second cache holds them."""


def compute_target_logprobs(
    logits: torch.Tensor, targets: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Compute each datum's log-probabilities, in the shape of its targets [T] or [T, K].

    `logits` [tokens, vocabulary] has the datums' rows one after another. The gradient overwrites
    the logits.
    """
    tables = [one.view(len(one), -1) for one in targets]
    widest = max(table.shape[1] for table in tables)
    padded = torch.cat([F.pad(table, (0, widest - table.shape[1])) for table in tables])
    known: torch.Tensor = _TargetLogprobs.apply(logits, padded)
    rows = known.split([len(table) for table in tables])
    return [
        own[:, : table.shape[1]].reshape(one.shape)
        for own, table, one in zip(rows, tables, targets, strict=True)
    ]


class _TargetLogprobs(torch.autograd.Function):
    """The log-probabilities [n, K] of targets [n, K] under logits [n, vocabulary]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = logits.split(_rows_at_once(logits))
        normalizers = torch.cat([rows.logsumexp(-1, keepdim=True) for rows in parts])
        ctx.save_for_backward(logits, targets, normalizers)
        return logits.gather(1, targets) - normalizers

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, *others = ctx.saved_tensors
        count = _rows_at_once(logits)
        columns = (one.split(count) for one in (logits, *others, gradients[0]))
        for rows, targets, normalizers, gradient in zip(*columns, strict=True):
            rows.sub_(normalizers).exp_().mul_(-gradient.sum(1, keepdim=True))
            rows.scatter_add_(1, targets, gradient)
        return logits, None


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // logits.shape[1])
