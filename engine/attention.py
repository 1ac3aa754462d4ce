"""Packed tokens → attended values: each sequence over itself, grouped by length.

Sequences whose lengths round up to the same bucket are computed in one batch. The kernels treat the
members of a batch one by one, so a sequence's values depend on its own length alone, not on its
companions: that, with the tiles of `passes.py`, is what makes sampling reproducible.
Measured, and tested, for torch 2.13 on x86 with MKL; another build may break it.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from engine.errors import UserError
from engine.passes import CURRENT, AttentionCall

NAME = "ratchet_packed"
"""Our name in transformers' registry of attention functions."""

SMALLEST_BUCKET = 64


def bucket(length: int) -> int:
    """The length rounded up: to 64s up to 512, to 128s up to 1024, to 256s up to 2048, …"""
    power_below = 1 << max((length - 1).bit_length() - 1, 0)
    step = max(SMALLEST_BUCKET, power_below // 4)
    return -(-length // step) * step


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The attention function given to transformers: [1, heads, tokens, width] each."""
    current = CURRENT.get()
    if current is None:
        raise RuntimeError("packed attention was called outside a pass")
    unknown = [name for name in ("s_aux", "position_bias") if others.get(name) is not None]
    if unknown or attention_mask is not None:
        raise UserError(
            f"{type(module).__name__} needs attention with {unknown or 'a mask of its own'}, "
            "which this engine does not compute; choose another base model"
        )
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", 0)),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    return current.attention.attend(call)[None], None


AttentionInterface.register(NAME, attend)


@dataclass(slots=True)
class Group:
    """Fresh sequences of one bucket.

    `tokens` [n, bucket] are positions in the packed row. Beyond a sequence's end its own first
    token stands in: causal attention never reads it, and no other sequence's numbers come near.
    """

    tokens: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def gather(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, width] → [n, heads, bucket, width]"""
        count, length = self.tokens.shape
        flat = packed.index_select(0, self.tokens.view(-1))
        return flat.view(count, length, *packed.shape[1:]).transpose(1, 2)

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Gathered [n, heads, bucket, width] → attended values [n · bucket, heads, width]."""
        return self._attend(call, query, key, value).transpose(1, 2).flatten(0, 1)

    def _attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        shared = query.shape[1] != key.shape[1]
        length = query.shape[2]
        windowed = call.window is not None and call.window < length
        if call.softcap is None:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=self.mask(call.window) if windowed else None,
                is_causal=not windowed,
                scale=call.scale,
                enable_gqa=shared,
            )
        repeats = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * call.scale
        scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores.masked_fill(~self.mask(call.window or length), float("-inf"))
        return scores.softmax(-1) @ value.repeat_interleave(repeats, 1)

    def mask(self, window: int | None) -> torch.Tensor:
        """[bucket, bucket], true where a query may look: its window's tokens, itself the last."""
        length = self.tokens.shape[1]
        span = window or length
        if span not in self.masks:
            positions = torch.arange(length, device=self.tokens.device)
            behind = positions[:, None] - positions[None, :]
            self.masks[span] = (behind >= 0) & (behind < span)
        return self.masks[span]


def grouped(lengths: list[int], starts: list[int]) -> tuple[list[np.ndarray], list[list[int]]]:
    """Sequences at `starts` of a packed row → (token positions [n, bucket], members) per bucket."""
    members: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        members.setdefault(bucket(length), []).append(number)
    tables = []
    for size, numbers in members.items():
        first = np.array([starts[number] for number in numbers])[:, None]
        ends = np.array([lengths[number] for number in numbers])[:, None]
        steps = np.arange(size)[None, :]
        tables.append(first + np.where(steps < ends, steps, 0))
    return tables, list(members.values())


class SequenceAttention:
    """Attention of whole sequences that fill a packed row from its start: training's."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64).tolist()
        tables, members = grouped(lengths, starts)
        self.groups = [Group(torch.from_numpy(table).to(device)) for table in tables]
        order = np.zeros(sum(lengths), dtype=np.int64)
        offset = 0
        for table, numbers in zip(tables, members, strict=True):
            for row, number in enumerate(numbers):
                begin = offset + row * table.shape[1]
                stop = starts[number] + lengths[number]
                order[starts[number] : stop] = np.arange(begin, begin + lengths[number])
            offset += table.size
        self.order = torch.from_numpy(order).to(device)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        parts = [
            group.attend(
                call, group.gather(call.query), group.gather(call.key), group.gather(call.value)
            )
            for group in self.groups
        ]
        return torch.cat(parts).index_select(0, self.order)
