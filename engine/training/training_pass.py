"""The computation of datums in training, in lots: nodes of the datums' trees that share one pass.

A row's values and gradients do not depend on the rows beside it, as in sampling. A LoRA's gradient
is a sum over rows. It is taken segment by segment, one after the other, so it does not depend on
which of them are computed together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Condition
from typing import Any

import numpy as np
import torch

from ratchet.engine.model.attention import Attention, LoraLinear
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.model.products import Products
from ratchet.engine.model.segments import Segment, SegmentAttention, Turn, no_turn
from ratchet.engine.training.losses import Inputs, TrainingDatum
from ratchet.engine.training.prefix_tree import Node, pack

MICROBATCH_TOKENS = 2048
"""Tokens computed at once. More tokens need more memory and are no faster on a CPU."""

MICROBATCH_WORK = 2**36
"""Products of a token and a weight computed at once: half a second of a core, and one to one and a
half gigabytes of activations. A model of many weights shrinks lots."""

MICROBATCH_LOGITS = 2**27
"""Logits computed at once: half a gigabyte in float32. A large vocabulary shrinks lots."""


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


class TreeComputation:
    """The computation of a request's datums and their loss, by the trees of their tokens.

    With `backward` it adds the gradient to `sums`. A lot is computed, then what follows its nodes
    and then the gradients of the lot, which need those of all that follows. A tree that does not
    fit one lot is computed in several, with no more in memory than a path of lots.
    """

    def __init__(
        self,
        model: LanguageModel,
        lora: LoraWeights,
        sums: GradientSums,
        datums: Sequence[TrainingDatum],
        loss: Callable[[torch.Tensor, Inputs], torch.Tensor],
        backward: bool,
    ) -> None:
        self.model, self.lora, self.sums = model, lora, sums
        self.datums, self.loss, self.backward = datums, loss, backward
        count = len(datums)
        self.logprobs: list[dict[Node, torch.Tensor]] = [{} for _ in range(count)]
        """Log-probabilities of each datum's targets in each node of its path."""
        self.slopes: list[dict[Node, torch.Tensor]] = [{} for _ in range(count)]
        """The loss's gradients of them."""
        self.outputs: list[np.ndarray] = [np.empty(0, np.float32)] * count
        self.losses = [0.0] * count

        self.budget = min(
            MICROBATCH_TOKENS, MICROBATCH_WORK // model.size, MICROBATCH_LOGITS // model.vocab_size
        )
        """Tokens of a lot."""

    def run(self, lots: list[list[Node]]) -> None:
        """Compute lots of first nodes, and all that grows from them."""
        workers = self.model.workers
        for start in range(0, len(lots), workers.count):
            together = lots[start : start + workers.count]
            order = LotOrder()
            passes = [_Lot(self, nodes, order, number) for number, nodes in enumerate(together)]
            try:
                workers.compute(_Lot.forward, passes)
                self.model.pause()
                following = [
                    lot
                    for nodes in together
                    for lot in pack((one for node in nodes for one in node.children), self.budget)
                ]
                self.run(following)
                if self.backward:
                    workers.compute(_Lot.backward, passes)
                    self.model.pause()
            finally:
                for one in passes:
                    one.forget()

    def end(self, number: int, path: list[Node]) -> None:
        """Compute the loss of a datum whose log-probabilities are all known, and its gradient."""
        datum, device = self.datums[number], self.model.device
        inputs = {
            name: torch.from_numpy(values).to(device) for name, values in datum.inputs.items()
        }
        parts = [self.logprobs[number].pop(node) for node in path]
        known = torch.cat(parts).view(inputs["target_tokens"].shape)
        self.outputs[number] = known.cpu().numpy()
        with torch.set_grad_enabled(self.backward):
            loss = self.loss(known.requires_grad_(), inputs)
        self.losses[number] = float(loss.detach())
        if self.backward:
            (slope,) = torch.autograd.grad(loss, known)
            split = slope.reshape(-1).split([len(part) for part in parts])
            self.slopes[number] = dict(zip(path, split, strict=True))


class _Lot:
    """Nodes of one depth of several trees, and their pass."""

    def __init__(
        self, computation: TreeComputation, nodes: Sequence[Node], order: LotOrder, number: int
    ) -> None:
        self.computation, self.nodes = computation, nodes
        self.order, self.number = order, number
        self.known: torch.Tensor | None = None
        self.attention: SegmentAttention | None = None

    def forward(self) -> None:
        """Compute the log-probabilities, and the losses of the datums that end here."""
        run, device = self.computation, self.computation.model.device
        count = sum(node.length for node in self.nodes)
        rows = count + -count % run.model.products.training_granule
        padding = np.zeros(rows - count, dtype=np.int64)
        turn = partial(self.order.take, self.number)
        read = [node for node in self.nodes if node.children]
        self.attention = attention = SegmentAttention(self.nodes, device, rows, read, turn)
        sums = LotSums(run.sums, self.nodes, len(padding), turn)
        current = TrainingPass(run.lora, attention, run.model.products, sums)
        positions = [np.arange(node.start, node.stop) for node in self.nodes]
        tokens, places = (
            torch.from_numpy(np.concatenate([*parts, padding])).to(device)
            for parts in ([node.tokens for node in self.nodes], positions)
        )
        with torch.set_grad_enabled(run.backward):
            logits = run.model.logits(tokens, places, current)
            self.known = known = compute_target_logprobs(logits, *self._targets(attention))
        members = [*self._members()]
        parts = known.detach().split([targets.size for *_, targets in members])
        for (node, number, _), part in zip(members, parts, strict=True):
            run.logprobs[number][node] = part
        for node in self.nodes:
            for number in node.ends:
                run.end(number, node.path)

    def _members(self) -> Iterable[tuple[Node, int, np.ndarray]]:
        """Yield each node, each datum that has its tokens, and the datum's targets in it [n, K]."""
        for node in self.nodes:
            for number in node.datums:
                targets = self.computation.datums[number].inputs["target_tokens"]
                yield node, number, targets[node.start : node.stop].reshape(node.length, -1)

    def _targets(self, attention: SegmentAttention) -> Iterable[torch.Tensor]:
        members = [(attention.rows[node], targets) for node, _, targets in self._members()]
        rows = [np.repeat(np.arange(first, first + len(of)), of.shape[1]) for first, of in members]
        columns = (np.concatenate(rows), np.concatenate([of.reshape(-1) for _, of in members]))
        device = self.computation.model.device
        return (torch.from_numpy(column).to(device) for column in columns)

    def backward(self) -> None:
        """Add the gradients of this lot's rows to the sums, and leave no graph of it."""
        assert self.known is not None, "`forward` comes first"
        assert self.attention is not None, "`forward` comes first"
        try:
            slopes = torch.cat(
                [self.computation.slopes[number].pop(node) for node, number, _ in self._members()]
            )
            pairs = [(self.known, slopes), *self.attention.kept_slopes()]
            outputs, gradients = zip(*pairs, strict=True)
            tensors = [*self.computation.lora.tensors.values()]
            torch.autograd.grad(outputs, tensors, gradients, allow_unused=True)
        finally:
            self.order.end(self.number)
        self._forget_graph()

    def forget(self) -> None:
        """Leave nothing of this lot, whose nodes nothing reads any more, also after an error."""
        self._forget_graph()
        for node in self.nodes:
            node.forget()

    def _forget_graph(self) -> None:
        """Cut the circle in which the graph holds the attention, and that the keys of the graph.

        The garbage collector sees no circle through nodes that are not Python's.
        """
        if self.attention is not None:
            self.attention.kept.clear()
        self.known = self.attention = None


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
