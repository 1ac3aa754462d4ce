"""The forward pass through the network, as its linear layers and attention see it.

The network is transformers' own and knows nothing of LoRAs, packing or caches. Its linear layers
and its attention functions ask the current pass (`CURRENT`), which is set around each call of the
network. Training and sampling implement `ForwardPass` in different ways.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from ratchet.engine.errors import RequestRefused

LayerKind = Literal["attention", "mlp", "unembedding"]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention inputs of one layer: tensors [tokens, heads, width], and the layer's settings."""

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
        """Return the attended values [tokens, heads, width], in the order of the packed tokens."""
        ...


class LoraLinear(nn.Module):
    """Replacement of an `nn.Linear` that shares its weight, tied or not.

    A linear layer computes x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ. The current pass decides whose A and
    B are used, so one network serves every LoRA.
    """

    def __init__(self, base: nn.Linear, name: str, kind: LayerKind) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.kind: LayerKind = kind
        self.group: LayerGroup
        self.columns: slice
        """The place of the layer's outputs among its group's outputs; the group sets both."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return CURRENT.get().linear(self, inputs)


class LayerGroup:
    """Linear layers that read one input; sampling computes their products as one product."""

    def __init__(self, layers: list[LoraLinear]) -> None:
        """Join the layers' weights [out, in], so that each has rows of one tensor."""
        self.layers = layers
        self.name = layers[0].name
        self.kind = layers[0].kind
        self.weight = layers[0].weight.detach()
        self.bias = layers[0].bias
        if len(layers) > 1:
            self.weight = torch.cat([layer.weight.detach() for layer in layers])
            if any(layer.bias is not None for layer in layers):
                zeros = torch.zeros(len(self.weight), device=self.weight.device)
                biases = (
                    zeros[: len(one.weight)] if one.bias is None else one.bias for one in layers
                )
                self.bias = torch.cat([*biases]).detach()
        self.packed = self.weight
        """The weight as sampling multiplies by it: `Products.pack`."""
        stop = 0
        for layer in layers:
            layer.group, layer.columns = self, slice(stop, stop + len(layer.weight))
            stop = layer.columns.stop
            if len(layers) > 1:
                layer.weight = nn.Parameter(self.weight[layer.columns], requires_grad=False)


class ForwardPass(Protocol):
    """A forward pass, as linear layers and attention functions see it."""

    @property
    def attention(self) -> Attention: ...

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor: ...


CURRENT: ContextVar[ForwardPass] = ContextVar("CURRENT")
"""The current pass of this thread."""


ATTENTION_NAME = "ratchet_packed"
"""Name of `attend` in transformers' registry of attention functions."""

SMALLEST_BUCKET = 64


def bucket(length: int) -> int:
    """Round a length up: to 64s up to 512, to 128s up to 1024, to 256s up to 2048, …"""
    power_below = 1 << max((length - 1).bit_length() - 1, 0)
    step = max(SMALLEST_BUCKET, power_below // 4)
    return -(-length // step) * step


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention by the current pass; tensors are [1, heads, tokens, width].

    transformers calls this function. Its keyword arguments that are not read here change no result.
    """
    unknown = [name for name in ("s_aux", "position_bias") if settings.get(name) is not None]
    if unknown or attention_mask is not None:
        raise RequestRefused(
            f"{type(module).__name__} needs attention with {unknown or 'a mask of its own'}, "
            "which this engine does not compute; choose another base model"
        )
    scaling = settings.get("scaling")
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", 0)),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=settings.get("sliding_window"),
        softcap=settings.get("softcap"),
    )
    return CURRENT.get().attention.attend(call)[None], None


AttentionInterface.register(ATTENTION_NAME, attend)


def attend_masked(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute values [n, heads, queries, width]; without a mask, attention is causal.

    The mask is true where a query may attend to a key. Key and value have fewer heads if several
    heads of the query share a head of theirs.
    """
    repeats = query.shape[1] // key.shape[1]
    if call.softcap is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=call.scale,
            enable_gqa=repeats > 1,
        )
    assert mask is not None
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * call.scale
    scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(repeats, 1)
