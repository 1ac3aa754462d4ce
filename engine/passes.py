"""One forward pass: whose LoRA a linear layer takes, and who attends to whom.

The network itself is transformers' and knows nothing of LoRAs, packing or caches. Its linear layers
and its attention ask the pass under way (`CURRENT`), which is set around each call of the network.

Training packs whole sequences into one row of tokens and computes as ordinary autograd does.

Sampling promises more: the same request gives the same bits whatever is computed beside it. A
matrix product gives a row the same bits only among as many rows as before, so every product is a
batch of products over tiles of TILE rows: the kernel then sees one shape, however many tiles there
are. A tile belongs to one LoRA. Attention is computed per sequence, over its own length rounded up
(`attention.py`); normalisations and activations work row by row.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from engine.lora import Lora, LoraLinear

TILE = 16
"""Rows of one matrix product. 16 reaches four fifths of the speed of 128 on AVX-512 and wastes
little where few rows are computed. A multiple of the vector width: no scalar tails."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of the attention: tensors [tokens, heads, width], and its settings."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None


class Attention(Protocol):
    """Attention over the sequences packed into one pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attended values [tokens, heads, width], in the order of the packed tokens."""
        ...


class Pass(Protocol):
    """A forward pass, as linear layers and attention see it."""

    @property
    def attention(self) -> Attention: ...

    def linear(self, layer: "LoraLinear", inputs: torch.Tensor) -> torch.Tensor: ...


CURRENT: ContextVar[Pass | None] = ContextVar("CURRENT", default=None)
"""The pass under way in this thread; None computes the base model as transformers would."""


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Every token belongs to one LoRA (None: the base model); gradients flow to it."""

    lora: "Lora | None"
    attention: Attention

    def linear(self, layer: "LoraLinear", inputs: torch.Tensor) -> torch.Tensor:
        outputs = F.linear(inputs, layer.weight, layer.bias)
        pair = self.lora.pairs.get(layer.name) if self.lora else None
        if self.lora is None or pair is None:
            return outputs
        a, b = (factor.to(inputs.dtype) for factor in pair)
        return outputs + F.linear(F.linear(inputs, a), b) * self.lora.config.scale


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles `start` to `stop` belong to one LoRA (None: the base model)."""

    lora: "Lora | None"
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SamplingPass:
    """Tiles of several LoRAs: `body` for the layers, `head` for the rows whose logits are asked.

    `merged` has, for small models, the transposed weights of each LoRA's layers with the update
    already added; the LoRAs it lacks are computed beside the base weights.
    """

    body: list[Tiles]
    head: list[Tiles]
    attention: Attention
    merged: "Mapping[Lora, Mapping[str, torch.Tensor]]"

    def linear(self, layer: "LoraLinear", inputs: torch.Tensor) -> torch.Tensor:
        """inputs [1, tokens, in] with tokens a multiple of TILE → [1, tokens, out]."""
        tiled = inputs.view(-1, TILE, inputs.shape[-1])
        strip = self.head if layer.kind == "unembedding" else self.body
        if len(strip) == 1:
            outputs = self._of_one(strip[0].lora, layer, tiled)
        else:
            shares = (self._of_one(t.lora, layer, tiled[t.start : t.stop]) for t in strip)
            outputs = torch.cat(list(shares))
        if layer.bias is not None:
            outputs += layer.bias
        return outputs.view(1, -1, outputs.shape[-1])

    def _of_one(
        self, lora: "Lora | None", layer: "LoraLinear", tiles: torch.Tensor
    ) -> torch.Tensor:
        if lora is None or layer.name not in lora.transposed:
            return tiled_product(tiles, layer.transposed)
        if lora in self.merged:
            return tiled_product(tiles, self.merged[lora][layer.name])
        outputs = tiled_product(tiles, layer.transposed)
        a, b = lora.transposed[layer.name]
        low = tiled_product(tiles, a.to(tiles.dtype))
        wide = b.to(tiles.dtype).expand(len(tiles), -1, -1)
        return outputs.baddbmm_(low, wide, alpha=lora.config.scale)


def tiled_product(tiles: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, TILE, in] times the one weight [in, out], one product a tile."""
    return torch.bmm(tiles, weight.expand(tiles.shape[0], -1, -1))
