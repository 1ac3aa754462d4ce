"""The forward pass of sampling, whose results do not depend on what shares the batch.

The same request gives the same bits whatever is computed beside it. The rows of a matrix product
keep their bits however many there are (`engine/model/products.py`), if they are a multiple of the
products' granule: the rows of each LoRA are padded to one. Attention depends on a token's sequence
and position alone (`cached_attention.py`); normalisations and activations work row by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.forward_pass import Attention, LoraLinear
from engine.model.lora import LoraWeights
from engine.model.products import Products


@dataclass(frozen=True, slots=True)
class Share:
    """The rows from `start` up to `stop`, which belong to one LoRA (None: the base model)."""

    lora: LoraWeights | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SamplingPass:
    """Rows of several LoRAs: `body` for the layers, `head` for the rows whose logits are needed.

    `merged` holds, for small models, the transposed weights of each LoRA's layers with the update
    already added. LoRAs absent from `merged` are computed beside the base weights.
    """

    products: Products
    body: list[Share]
    head: list[Share]
    attention: Attention
    merged: Mapping[LoraWeights, Mapping[str, torch.Tensor]]

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs [1, rows, in], whose rows are multiples of the granule, to [1, rows, out]."""
        rows = inputs[0]
        shares = self.head if layer.kind == "unembedding" else self.body
        if len(shares) == 1:
            outputs = self._multiply(shares[0].lora, layer, rows)
        else:
            parts = (self._multiply(one.lora, layer, rows[one.start : one.stop]) for one in shares)
            outputs = torch.cat(list(parts))
        if layer.bias is not None:
            outputs += layer.bias
        return outputs[None]

    def _multiply(
        self, lora: LoraWeights | None, layer: LoraLinear, rows: torch.Tensor
    ) -> torch.Tensor:
        """Multiply the rows of one LoRA by the layer's weights, without the bias."""
        pair = None if lora is None else lora.frozen_pairs.get(layer.name)
        if lora is None or pair is None:
            return self.products.multiply(rows, layer.packed)
        if lora in self.merged:
            return self.products.multiply(rows, self.merged[lora][layer.name])
        outputs = self.products.multiply(rows, layer.packed)
        return self.products.update(outputs, rows, pair, lora.config.scale)
