"""A LoRA's pass in training: the gradients of its rows, and their sums by segments.

A row's values and gradients do not depend on the rows beside it, as in sampling. A LoRA's gradient
is a sum over rows. It is taken segment by segment, one after the other, so it does not depend on
which of them are computed together.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Condition
from typing import Any

import torch

from engine.model.attention import Attention, LoraLinear
from engine.model.lora import LoraWeights
from engine.model.products import Products
from engine.model.segments import Segment, Turn


class Turns:
    """The order in which lots that are computed at once add to the same sums."""

    def __init__(self) -> None:
        self._added: defaultdict[str, set[int]] = defaultdict(set)
        self._ended: set[int] = set()
        self._changed = Condition()

    @contextmanager
    def take(self, number: int, name: str) -> Iterator[None]:
        """Wait until the lots of lower numbers have added to a sum, or have ended."""
        before = set(range(number))
        with self._changed:
            self._changed.wait_for(lambda: before <= self._added[name] | self._ended)
        yield
        with self._changed:
            self._added[name].add(number)
            self._changed.notify_all()

    def end(self, number: int) -> None:
        with self._changed:
            self._ended.add(number)
            self._changed.notify_all()


class GradientSums:
    """Gradients of a LoRA since its last step, summed by the depth of the segments.

    A depth has sums of its own, so that only the order of its own segments matters.
    """

    def __init__(self, lora: LoraWeights) -> None:
        self.lora = lora
        self._sums: dict[int, dict[str, torch.Tensor]] = {}

    def add(
        self, name: str, pair: tuple[torch.Tensor, torch.Tensor], rows: "SegmentRows"
    ) -> None:
        """Add the products leftᵀ right of each segment's rows, of left [n, rank] and right."""
        left, right = (one.reshape(-1, one.shape[-1]) for one in pair)
        for depth, start, stop in rows.of(len(left)):
            sums = self._sums.setdefault(depth, {})
            if name not in sums:
                sums[name] = left.new_zeros((left.shape[1], right.shape[1]))
            sums[name].addmm_(left[start:stop].t(), right[start:stop])

    def total(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each weight by name."""
        found = {}
        for name, tensor in self.lora.tensors.items():
            total = torch.zeros_like(tensor)
            for depth in sorted(self._sums):
                if (known := self._sums[depth].get(name)) is not None:
                    total += known.t() if name.endswith("_B") else known
            found[name] = total.detach()
        return found

    def clear(self) -> None:
        self._sums.clear()


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """The rows of segments that fill a packed row of `count` tokens from its start."""

    segments: Sequence[Segment]
    count: int

    def of(self, count: int) -> list[tuple[int, int, int]]:
        """Return depth, start and stop of the segments' rows.

        A layer that reads a selection of the tokens has one sum of all of them.
        """
        if count != self.count:
            return [(self.segments[0].depth, 0, count)]
        bounds = pairwise(accumulate((one.length for one in self.segments), initial=0))
        return [(one.depth, *of) for one, of in zip(self.segments, bounds, strict=True)]


@dataclass(slots=True)
class TrainingPass:
    """A forward pass in which every token belongs to one LoRA.

    Its gradients are added to `sums` in the backward pass, in `turn`.
    """

    lora: LoraWeights
    attention: Attention
    products: Products
    rows: SegmentRows
    sums: GradientSums
    turn: Turn

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        pair = self.lora.pairs.get(layer.name)
        if pair is None:
            return _Product.apply(inputs, layer, self.products)
        return _LoraProduct.apply(inputs, *pair, layer, self)


class _Product(torch.autograd.Function):
    """The product x Wᵀ + bias of a frozen W."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, layer: LoraLinear, products: Products
    ) -> torch.Tensor:
        ctx.weight, ctx.products = layer.weight, products
        outputs = products.product(inputs, layer.weight)
        return outputs if layer.bias is None else outputs.add_(layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.products.product(gradients[0], ctx.weight.t()), None, None


class _LoraProduct(torch.autograd.Function):
    """The product x Wᵀ + bias + scale · (x Aᵀ) Bᵀ of a frozen W.

    The gradients of A and B are added to the pass's sums instead of being returned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        layer: LoraLinear,
        current: TrainingPass,
    ) -> torch.Tensor:
        products, scale = current.products, current.lora.config.scale
        low = products.product(inputs, a).mul_(scale)
        ctx.save_for_backward(inputs, a, b, low)
        ctx.layer, ctx.current = layer, current
        outputs = products.add_product(products.product(inputs, layer.weight), low, b)
        return outputs if layer.bias is None else outputs.add_(layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        inputs, a, b, low = ctx.saved_tensors
        layer, current = ctx.layer, ctx.current
        products = current.products
        for_low = products.product(gradient, b.t()).mul_(current.lora.config.scale)
        with current.turn(layer.name):
            current.sums.add(f"{layer.name}.lora_A", (for_low, inputs), current.rows)
            # The transposed product takes a quarter of the time.
            current.sums.add(f"{layer.name}.lora_B", (low, gradient), current.rows)
        for_inputs = None
        if ctx.needs_input_grad[0]:
            for_inputs = products.product(gradient, layer.weight.t())
            for_inputs = products.add_product(for_inputs, for_low, a.t())
        return for_inputs, None, None, None, None
