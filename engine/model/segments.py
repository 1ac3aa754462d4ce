"""Causal attention of segments: each over itself, and over the segments that come before it.

A sequence is a segment, or a path of segments whose first ones are shared with others. The
keys and values of a segment that others follow are kept, and the others' gradients of them are
summed in an order of their own: by the depth of the segment that they come from and, within a
depth, in the order of the segments.

Segments whose queries and keys round up to the same sizes are computed in one batch. The kernels
treat the members of a batch one by one, so a segment's values depend on its own path alone. The
property was measured and is tested for torch 2.13 on x86 with MKL; another build may break it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ratchet.engine.model.attention import AttentionCall, attend_masked, bucket

FEWEST = 16
"""The size that the shortest segments are padded to."""

Turn = Callable[[str], AbstractContextManager[None]]
"""Name of what is summed → a context, which begins when all that comes before has been added."""


def no_turn(name: str) -> AbstractContextManager[None]:
    del name
    return nullcontext()


Kind = tuple[int, int]
"""A layer, and 0 for its keys or 1 for its values."""


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens of a sequence, after those of `parent`.

    `known` has the keys and values [2, tokens, heads, width] of each layer. `slopes` has the
    gradients of each kind, by the depth of the segments that read them.
    """

    length: int
    parent: "Segment | None" = None
    start: int = field(init=False, default=0)
    depth: int = field(init=False, default=0)
    known: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    slopes: dict[tuple[Kind, int], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.start, self.depth = self.parent.stop, self.parent.depth + 1

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def before(self) -> "list[Segment]":
        """The segments before this one, the first one first."""
        return [] if self.parent is None else [*self.parent.before, self.parent]

    def forget(self) -> None:
        """Free keys, values and their gradients, which nothing reads any more."""
        self.known.clear()
        self.slopes.clear()

    def slope(self, of: Kind) -> torch.Tensor:
        """Return the gradient of a layer's keys or values, as summed by depth."""
        depths = sorted(depth for known, depth in self.slopes if known == of)
        total = self.slopes[of, depths[0]]
        for depth in depths[1:]:
            total = total + self.slopes[of, depth]
        return total


@dataclass(slots=True)
class Group:
    """Segments whose queries and keys have the same sizes.

    `queries` [n, size] are places in the packed row, and `keys` [n, size] places in the packed row
    with the rows of earlier segments after it. Both are padded with the segment's first token,
    which no query of another position attends to.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    starts: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    is_whole: bool = field(init=False)
    """True if the segments are whole sequences, or the beginnings of some."""

    def __post_init__(self) -> None:
        self.is_whole = not self.starts.any()

    def attend(self, call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute values [n · queries, heads, width] of gathered keys and values."""
        query = gather(call.query, self.queries)
        windowed = call.window is not None and call.window < self.keys.shape[1]
        masked = windowed or call.softcap is not None or not self.is_whole
        mask = self.mask(call.window) if masked else None
        values = attend_masked(call, query, key, value, mask)
        return values.transpose(1, 2).flatten(0, 1)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return [n or 1, 1, queries, keys], true where a query may attend to a key."""
        count, size = self.queries.shape[1], self.keys.shape[1]
        span = window or size
        if span not in self.masks:
            device = self.keys.device
            starts = self.starts[:1] if self.is_whole else self.starts
            places = starts[:, None] + torch.arange(count, device=device)
            # Padding asks as the last key does, so that no window leaves it without a key.
            places = places.clamp(max=size - 1)
            behind = places[:, None, :, None] - torch.arange(size, device=device)
            self.masks[span] = (behind >= 0) & (behind < span)
        return self.masks[span]


def gather(packed: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather packed [tokens, heads, width] as [n, heads, size, width]."""
    flat = packed.index_select(0, places.view(-1))
    return flat.view(*places.shape, *packed.shape[1:]).transpose(1, 2)


class SegmentAttention:
    """Attention of segments that fill a packed row from its start, as in training.

    `read` are those whose keys and values are kept, since others follow.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        rows: int | None = None,
        read: Sequence[Segment] = (),
        turn: Turn = no_turn,
    ) -> None:
        self.segments = segments
        self.turn = turn
        """Context in which the gradients of earlier segments are summed."""
        starts = [0, *accumulate(segment.length for segment in segments)]
        self.count = count = starts.pop()
        self.rows = dict(zip(segments, starts, strict=True))
        self.read = {one: slice(self.rows[one], self.rows[one] + one.length) for one in read}
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Layer → the packed keys and values, if some are read later."""
        earlier = [*dict.fromkeys(before for one in segments for before in one.before)]
        rows = count if rows is None else rows
        places = accumulate((one.length for one in earlier), initial=rows)
        self.earlier = dict(zip(earlier, places, strict=False))
        self._group(rows, device)

    def _group(self, rows: int, device: torch.device) -> None:
        members: dict[tuple[int, int], list[Segment]] = {}
        for segment in self.segments:
            sizes = (_size(segment.length), _size(segment.stop))
            members.setdefault(sizes, []).append(segment)
        order = np.zeros(rows, dtype=np.int64)
        own = np.zeros(rows, dtype=np.int64)
        self.groups: list[Group] = []
        self.places: dict[Segment, int] = {}
        """Place of a segment's first key in the concatenated keys of the groups."""
        queries, keys = 0, 0
        for (few, many), segments in members.items():
            asking = np.empty((len(segments), few), dtype=np.int64)
            asked = np.empty((len(segments), many), dtype=np.int64)
            for number, one in enumerate(segments):
                first = self.rows[one]
                mine = np.arange(first, first + one.length)
                order[mine] = queries + number * few + np.arange(one.length)
                own[mine] = keys + number * many + np.arange(one.start, one.stop)
                self.places[one] = keys + number * many
                past = [
                    np.arange(self.earlier[part], self.earlier[part] + part.length)
                    for part in one.before
                ]
                asking[number] = _padded([mine], few)
                asked[number] = _padded([*past, mine], many)
            starts = torch.tensor([one.start for one in segments], device=device)
            places, known = (torch.from_numpy(one).to(device) for one in (asking, asked))
            self.groups.append(Group(places, known, starts))
            queries, keys = queries + asking.size, keys + asked.size
        self.order = torch.from_numpy(order).to(device)
        """The place of each token in the groups' concatenated queries."""
        self.own = torch.from_numpy(own).to(device)
        """The place of each token in the groups' concatenated keys."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.read:
            self.kept[call.layer] = (call.key, call.value)
            for segment, rows in self.read.items():
                known = torch.stack([call.key.detach()[rows], call.value.detach()[rows]])
                segment.known[call.layer] = known
        gathered = _Gathered.apply(call.key, call.value, self, call.layer)
        half = len(self.groups)
        pairs = zip(self.groups, gathered[:half], gathered[half:], strict=True)
        parts = [group.attend(call, key, value) for group, key, value in pairs]
        return _joined(parts).index_select(0, self.order)

    def gather(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> list[torch.Tensor]:
        """Return the keys of each group, and then the values of each."""
        sources = [key, value]
        if self.earlier:
            known = torch.cat([segment.known[layer] for segment in self.earlier], 1)
            sources = [torch.cat([own, past]) for own, past in zip(sources, known, strict=True)]
        return [gather(source, group.keys) for source in sources for group in self.groups]

    def scatter(self, slopes: Sequence[torch.Tensor], layer: int) -> list[torch.Tensor]:
        """Return the gradients of packed keys and values; add those of earlier segments to theirs.

        Take the gradients of what `gather` returned.
        """
        half, found = len(self.groups), []
        with self.turn(f"keys of layer {layer}") if self.earlier else nullcontext():
            for which, kind in enumerate((slopes[:half], slopes[half:])):
                flat = _joined([one.transpose(1, 2).flatten(0, 1) for one in kind])
                for segment in self.segments:
                    place = self.places[segment]
                    for part in segment.before:
                        slope = flat[place + part.start : place + part.stop]
                        key = ((layer, which), segment.depth)
                        if key in part.slopes:
                            part.slopes[key] += slope
                        else:
                            part.slopes[key] = slope.clone()
                own = flat.index_select(0, self.own)
                own[self.count :] = 0  # nothing reads padding
                found.append(own)
        return found

    def kept_slopes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what is kept and has a gradient, each with its gradient."""
        for layer, kinds in self.kept.items():
            for which, kept in enumerate(kinds):
                if kept.requires_grad:
                    slopes = torch.zeros_like(kept)
                    for segment, rows in self.read.items():
                        slopes[rows] = segment.slope((layer, which))
                    yield kept, slopes


class _Gathered(torch.autograd.Function):
    """Keys and values by group, whose gradients are summed by `SegmentAttention`."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, attention: SegmentAttention, layer: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.attention, ctx.layer = attention, layer
        return tuple(attention.gather(key, value, layer))

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        key, value = ctx.attention.scatter(slopes, ctx.layer)
        return key, value, None, None


def _size(length: int) -> int:
    """Round a length up: to 16, 32 or 64, and as `bucket` does beyond."""
    return (
        bucket(length) if length > bucket(1) // 2 else max(FEWEST, 1 << (length - 1).bit_length())
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(parts: list[np.ndarray], size: int) -> np.ndarray:
    places = np.concatenate(parts)
    return np.concatenate([places, np.full(size - len(places), places[0])])
