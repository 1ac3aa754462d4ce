"""The forward pass of sampling, whose results do not depend on what shares the batch.

The same request gives the same bits whatever is computed beside it. The rows of a matrix product
keep their bits however many there are (`engine/model/products.py`), if they are a multiple of the
products' granule: the rows of each LoRA are padded to one. Attention depends on a token's sequence
and position alone (`cached_attention.py`); normalisations and activations work row by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from engine.model.forward_pass import Attention, LayerGroup, LoraLinear
from engine.model.lora import LoraWeights
from engine.model.products import Pair, Products

ReadyLoras: TypeAlias = Mapping[LoraWeights, Mapping[str, torch.Tensor] | Mapping[str, Pair]]
"""LoRA → name of a group of layers → the group's weights as sampling multiplies by them, merged or
as a pair."""


@dataclass(frozen=True, slots=True)
class Share:
    """The rows from `start` up to `stop`, which belong to one LoRA (None: the base model)."""

    lora: LoraWeights | None
    start: int
    stop: int


@dataclass(slots=True)
class SamplingPass:
    """Rows of several LoRAs: `body` for the layers, `head` for the rows whose logits are needed.

    `ready` holds each LoRA's layers: the transposed weights with the update already added, or the
    pair that is computed beside the base weights.
    """

    products: Products
    body: list[Share]
    head: list[Share]
    attention: Attention
    ready: ReadyLoras
    last: tuple[LayerGroup, torch.Tensor, torch.Tensor] | None = None
    """The group that was computed last, its inputs and its outputs."""

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs [1, rows, in], whose rows are multiples of the granule, to [1, rows, out].

        The first layer of a group computes the outputs of all, which the others return.
        """
        group = layer.group
        if len(group.layers) == 1:
            return self._compute(group, inputs)
        if self.last is None or self.last[0] is not group or self.last[1] is not inputs:
            self.last = (group, inputs, self._compute(group, inputs))
        return self.last[2][..., layer.columns]

    def _compute(self, group: LayerGroup, inputs: torch.Tensor) -> torch.Tensor:
        shares = self.head if group.kind == "unembedding" else self.body
        if len(shares) == 1:
            outputs = self._multiply(shares[0].lora, group, inputs)
        else:
            parts = [
                self._multiply(one.lora, group, inputs[:, one.start : one.stop]) for one in shares
            ]
            outputs = torch.cat(parts, 1)
        if group.bias is not None:
            outputs += group.bias
        return outputs

    def _multiply(
        self, lora: LoraWeights | None, group: LayerGroup, rows: torch.Tensor
    ) -> torch.Tensor:
        """Multiply one LoRA's rows [1, n, in] by a group's weights, without the bias."""
        own = None if lora is None else self.ready[lora].get(group.name)
        if isinstance(own, torch.Tensor):
            return self.products.multiply(rows, own)
        outputs = self.products.multiply(rows, group.packed)
        return outputs if own is None else self.products.update(outputs, rows, own)
