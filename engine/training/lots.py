"""Lots: nodes of the datums' trees that are computed in one pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.model.segments import SegmentAttention
from ratchet.engine.training.datums import TrainingDatum
from ratchet.engine.training.losses import Config, EngineLoss
from ratchet.engine.training.prefix_tree import Node, grow_forest, pack
from ratchet.engine.training.target_logprobs import compute_target_logprobs
from ratchet.engine.training.training_pass import GradientSums, LotOrder, LotSums, TrainingPass

MICROBATCH_TOKENS = 2048
"""Tokens computed at once. More tokens need more memory and are no faster on a CPU."""

MICROBATCH_WORK = 2**36
"""Products of a token and a weight computed at once: half a second of a core, and one to one and a
half gigabytes of activations. A model of many weights shrinks lots."""

MICROBATCH_LOGITS = 2**27
"""Logits computed at once: half a gigabyte in float32. A large vocabulary shrinks lots."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its datums, and their loss; with `backward`, its gradient too."""

    datums: Sequence[TrainingDatum]
    loss: EngineLoss
    config: Config
    backward: bool


class TreeComputation:
    """The computation of a request's datums, by the trees of their tokens.

    A lot is computed, then what follows its nodes and then the gradients of the lot, which need
    those of all that follows. A tree that does not fit one lot is computed in several, with no more
    in memory than a path of lots.
    """

    def __init__(
        self, model: LanguageModel, lora: LoraWeights, sums: GradientSums, asked: Asked
    ) -> None:
        self.model = model
        self.lora = lora
        self.sums = sums
        self.asked = asked
        count = len(asked.datums)
        self.logprobs: list[dict[Node, torch.Tensor]] = [{} for _ in range(count)]
        """Log-probabilities of each datum's targets in each node of its path."""
        self.slopes: list[dict[Node, torch.Tensor]] = [{} for _ in range(count)]
        """The loss's gradients of them."""
        self.outputs: list[np.ndarray] = [np.empty(0, np.float32)] * count
        self.losses = [0.0] * count

    @property
    def budget(self) -> int:
        """Tokens of a lot."""
        return min(
            MICROBATCH_TOKENS,
            MICROBATCH_WORK // self.model.size,
            MICROBATCH_LOGITS // self.model.vocab_size,
        )

    def run(self) -> None:
        forest = grow_forest([np.asarray(datum.tokens) for datum in self.asked.datums])
        self._run(pack(forest, self.budget))

    def _run(self, lots: list[list[Node]]) -> None:
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
                self._run(following)
                if self.asked.backward:
                    workers.compute(_Lot.backward, passes)
                    self.model.pause()
            finally:
                for one in passes:
                    one.forget()

    def end(self, number: int, path: list[Node]) -> None:
        """Compute the loss of a datum whose log-probabilities are all known, and its gradient."""
        datum, device = self.asked.datums[number], self.model.device
        inputs = {
            name: torch.from_numpy(values).to(device) for name, values in datum.inputs.items()
        }
        parts = [self.logprobs[number].pop(node) for node in path]
        known = torch.cat(parts).view(inputs["target_tokens"].shape)
        self.outputs[number] = known.cpu().numpy()
        with torch.set_grad_enabled(self.asked.backward):
            loss = self.asked.loss(known.requires_grad_(), inputs, self.asked.config)
        self.losses[number] = float(loss.detach())
        if self.asked.backward:
            (slope,) = torch.autograd.grad(loss, known)
            split = slope.reshape(-1).split([len(part) for part in parts])
            self.slopes[number] = dict(zip(path, split, strict=True))


class _Lot:
    """Nodes of one depth of several trees, and their pass."""

    def __init__(
        self, computation: TreeComputation, nodes: Sequence[Node], order: LotOrder, number: int
    ) -> None:
        self.computation = computation
        self.nodes = nodes
        self.order = order
        self.number = number
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
        with torch.set_grad_enabled(run.asked.backward):
            logits = run.model.logits(tokens, places, current)
            self.known = known = compute_target_logprobs(logits, *self._targets(attention))
        self._deliver(known.detach())

    def _members(self) -> Iterable[tuple[Node, int, np.ndarray]]:
        """Yield each node, each datum that has its tokens, and the datum's targets in it [n, K]."""
        for node in self.nodes:
            for number in node.datums:
                targets = self.computation.asked.datums[number].inputs["target_tokens"]
                yield node, number, targets[node.start : node.stop].reshape(node.length, -1)

    def _targets(self, attention: SegmentAttention) -> Iterable[torch.Tensor]:
        """Return the row of each target, and the targets."""
        members = [(attention.rows[node], targets) for node, _, targets in self._members()]
        rows = [np.repeat(np.arange(first, first + len(of)), of.shape[1]) for first, of in members]
        columns = (np.concatenate(rows), np.concatenate([of.reshape(-1) for _, of in members]))
        device = self.computation.model.device
        return (torch.from_numpy(column).to(device) for column in columns)

    def _deliver(self, known: torch.Tensor) -> None:
        run = self.computation
        members = [*self._members()]
        parts = known.split([targets.size for *_, targets in members])
        for (node, number, _), part in zip(members, parts, strict=True):
            run.logprobs[number][node] = part
        for node in self.nodes:
            for number in node.ends:
                run.end(number, node.path)

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

        The garbage collector sees no such circle, since it leads through nodes that are not
        Python's.
        """
        if self.attention is not None:
            self.attention.kept.clear()
        self.known = self.attention = None
