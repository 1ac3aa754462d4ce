"""Log-probabilities of targets; several targets may belong to one row of logits."""

from typing import Any

import torch

LOGITS_AT_ONCE = 2**18
"""Logits that a few operations compute one after another: a processor's second cache holds them."""


def compute_target_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Compute the log-probabilities [n] of targets [n] under the rows [n] of the logits.

    The gradient overwrites the logits [tokens, vocabulary].
    """
    return _TargetLogprobs.apply(logits, rows, targets)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        parts = logits.split(_rows_at_once(logits))
        normalizers = torch.cat([part.logsumexp(-1) for part in parts])
        places = rows * logits.shape[1] + targets
        ctx.save_for_backward(logits, rows, places, normalizers)
        return logits.view(-1).index_select(0, places) - normalizers.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, rows, places, normalizers = ctx.saved_tensors
        (gradient,) = gradients
        factors = torch.zeros_like(normalizers).index_add_(0, rows, gradient).neg_()
        columns = (one.split(_rows_at_once(logits)) for one in (logits, normalizers, factors))
        for part, normalizer, factor in zip(*columns, strict=True):
            part.sub_(normalizer[:, None]).exp_().mul_(factor[:, None])
        logits.view(-1).index_add_(0, places, gradient)
        return logits, None, None


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // logits.shape[1])
