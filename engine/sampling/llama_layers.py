"""Networks of Llama's kind, computed in a third of the operations of transformers' own layers.

A small model takes longer to begin an operation than to compute it. The bits are those of the
network, by a trial: a network that fails it is computed by transformers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ratchet.engine.model.attention import AttentionCall
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.segments import Segment, SegmentAttention
from ratchet.engine.sampling.sampling_pass import SamplingPass, Share

Rows = torch.Tensor
"""Vectors of a token each [tokens, ..., width]."""
Map = Callable[[Rows], Rows]
Layer = Callable[[Rows, Map, SamplingPass], Rows]
"""Maps rows to a layer's outputs, by the rotation of queries and keys, in a pass."""
Logits = Callable[[torch.Tensor, torch.Tensor, SamplingPass, torch.Tensor], torch.Tensor]
"""Computes what `LanguageModel.logits` computes, without gradients."""

TRIED = (30, 18)
"""Lengths of a trial's sequences, together a multiple of a tile. One has the first positions, and
one the last: some networks change their queries or their rotation far from the start."""


@torch.no_grad()
def find_logits(model: LanguageModel) -> Logits:
    """Return the function in few operations, if the network has the parts and results of Llama's.

    For any other network it is the model's own.
    """
    try:
        found = _logits_of(model)
    except (AttributeError, ValueError):
        return model.logits
    near, far = TRIED
    last = torch.arange(far) + max(0, model.max_context - far)
    positions = torch.cat([torch.arange(near), last]).to(model.device)
    shares = [Share(None, 0, len(positions))]
    attention = SegmentAttention([Segment(length) for length in TRIED], model.device)
    current = SamplingPass(model.products, shares, shares, attention, {})
    tokens, rows = positions * 31 % model.vocab_size, torch.arange(len(positions)).to(model.device)
    ours, theirs = (compute(tokens, positions, current, rows) for compute in (found, model.logits))
    return found if torch.equal(ours, theirs) else model.logits


def _logits_of(model: LanguageModel) -> Logits:
    own: Any = model.network
    body, head = own.model, own.lm_head.group
    last = _norm(body.norm)
    layers = [_layer(*pair) for pair in zip(body.layers, model.attended, strict=True)]

    def compute(
        tokens: torch.Tensor, positions: torch.Tensor, current: SamplingPass, rows: torch.Tensor
    ) -> torch.Tensor:
        hidden = F.embedding(tokens, body.embed_tokens.weight)
        turn = _turn(*body.rotary_emb(hidden[None], positions[None]))
        for layer in layers:
            hidden = layer(hidden, turn, current)
        return current.multiply(head, last(hidden.index_select(0, rows)))

    return compute


def _layer(own: Any, call: AttentionCall) -> Layer:
    """Return a layer: attention, whose queries and keys may be normalised, and a gated product."""
    attention, mlp = own.self_attn, own.mlp
    queries, few, width = call.query.shape[1], *call.key.shape[1:]
    before, after = _norm(own.input_layernorm), _norm(own.post_attention_layernorm)
    mixing, out = attention.q_proj.group, attention.o_proj.group
    gated, down, activation = mlp.gate_proj.group, mlp.down_proj.group, mlp.act_fn.forward
    norm: Map | None = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm] * queries + [attention.k_norm] * few
        norm = _norm(attention.q_norm, torch.stack([one.weight for one in norms]))
    settings = call.scale, call.window, call.softcap

    def compute(rows: Rows, turn: Map, current: SamplingPass) -> Rows:
        count = rows.shape[0]
        mixed = current.multiply(mixing, before(rows)).view(count, -1, width)
        turned, values = mixed[:, : queries + few], mixed[:, queries + few :]
        turned = turn(turned if norm is None else norm(turned))
        asked, known = turned[:, :queries], turned[:, queries:]
        attending = AttentionCall(call.layer, asked, known, values, *settings)
        attended = current.attention.attend(attending).view(count, -1)
        rows = current.multiply(out, attended).add_(rows)
        gate, up = current.multiply(gated, after(rows)).chunk(2, -1)
        return current.multiply(down, activation(gate).mul_(up)).add_(rows)

    return compute


def _norm(own: Any, weight: torch.Tensor | None = None) -> Map:
    """Return a function that divides rows by their root mean square, as the module does."""
    factors: torch.Tensor = own.weight if weight is None else weight
    # An operation takes a tensor faster than a number.
    width, epsilon = (
        torch.tensor(float(number), device=factors.device)
        for number in (factors.shape[-1], own.variance_epsilon)
    )

    def norm(rows: Rows) -> Rows:
        squares = (rows * rows).sum(-1, True).div_(width).add_(epsilon)
        return (rows * squares.rsqrt_()).mul_(factors)

    return norm


def _turn(cosines: torch.Tensor, sines: torch.Tensor) -> Map:
    """Return a function that rotates rows [tokens, heads, width]; both are [1, tokens, width]."""
    half = sines.shape[-1] // 2
    sines = torch.cat((sines[0, :, None, :half].neg(), sines[0, :, None, half:]), -1)
    cosines = cosines[0, :, None]
    return lambda rows: (rows * cosines).add_(rows.roll(half, -1).mul_(sines))
