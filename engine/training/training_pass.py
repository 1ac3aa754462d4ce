"""A LoRA's pass in training: the gradients of its rows, and their sums by segments.

A row's values and gradients do not depend on the rows beside it, as in sampling. A LoRA's gradient
is a sum over rows. It is taken segment by segment, one after the other, so it does not depend on
which of them are computed together.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from threading import Condition
from typing import Any

import torch

from ratchet.engine.model.attention import Attention, LoraLinear
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.model.products import Products
from ratchet.engine.model.segments import Segment, Turn, no_turn


class LotOrder:
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

    def of(self, depth: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """Return a depth's sum of one weight's gradient, which begins as zeros."""
        sums = self._sums.setdefault(depth, {})
        if name not in sums:
            sums[name] = torch.zeros(shape, device=self.lora.tensors[name].device)
        return sums[name]

    def total(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each weight by name."""
        found = {}
        depths = [self._sums[depth] for depth in sorted(self._sums)]
        for name, tensor in self.lora.tensors.items():
            sums = [known[name] for known in depths if name in known]
            total = sum(sums[1:], sums[0]) if sums else torch.zeros_like(tensor)
            found[name] = total.t().contiguous() if sums and name.endswith("_B") else total.detach()
        return found

    def clear(self) -> None:
        self._sums.clear()


@dataclass(frozen=True, slots=True)
class LotSums:
    """The part of segments of one depth in the sums; `padding` is the rows after theirs.

    A layer that reads a selection of the tokens has one sum of all its rows.
    """

    sums: GradientSums
    segments: Sequence[Segment]
    padding: int
    turn: Turn = no_turn

    def add(self, layer: str, *factors: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add leftᵀ right of each segment's rows to A's sum, and then so to Bᵀ's."""
        lengths = [*(segment.length for segment in self.segments), self.padding]
        with self.turn(layer):
            for name, pair in zip(("lora_A", "lora_B"), factors, strict=True):
                left, right = (one.reshape(-1, one.shape[-1]) for one in pair)
                shape = (left.shape[1], right.shape[1])
                total = self.sums.of(self.segments[0].depth, f"{layer}.{name}", shape)
                own = lengths if len(left) == sum(lengths) else [len(left), 0]
                parts = zip(left.t().split(own, 1), right.split(own), strict=True)
                for columns, rows in islice(parts, len(own) - 1):
                    total.addmm_(columns, rows)


@dataclass(slots=True)
class TrainingPass:
    """A forward pass in which every token belongs to one LoRA.

    The backward pass adds the LoRA's gradients to `sums`.
    """

    lora: LoraWeights
    attention: Attention
    products: Products
    sums: LotSums

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
        # The transposed product of B takes a quarter of the time.
        current.sums.add(layer.name, (for_low, inputs), (low, gradient))
        for_inputs = None
        if ctx.needs_input_grad[0]:
            for_inputs = products.product(gradient, layer.weight.t())
            for_inputs = products.add_product(for_inputs, for_low, a.t())
        return for_inputs, None, None, None, None
