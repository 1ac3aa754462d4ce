"""Networks of Llama's kind, sampled in a third of the operations of transformers' own layers.

A small model takes longer to begin an operation than to compute it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ratchet.engine.model.attention import AttentionCall
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.segments import Segment, SegmentAttention
from ratchet.engine.sampling.sampling_pass import SamplingPass, Share

Map = Callable[..., torch.Tensor]

TRIED = (30, 18)
"""Lengths of a trial's sequences, together a multiple of a tile. One has the first positions, and
one the last: some networks change their queries or their rotation far from the start."""


@torch.no_grad()
def find_logits(model: LanguageModel) -> Map:
    """Return the function in few operations if its bits are those of `model.logits`, else that."""
    try:
        found = _logits_of(model.network, model.attended)
    except (AttributeError, ValueError):  # other parts, or other layers that attend
        return model.logits
    near, far = (torch.arange(length, device=model.device) for length in TRIED)
    positions = torch.cat([near, far + max(0, model.max_context - len(far))])
    shares = [Share(None, 0, len(positions))]
    attention = SegmentAttention([Segment(length) for length in TRIED], model.device)
    current = SamplingPass(model.products, shares, shares, attention, {})
    asked = positions * 31 % model.vocab_size, positions, current, torch.arange(len(positions))
    return found if torch.equal(found(*asked), model.logits(*asked)) else model.logits


def _logits_of(own: Any, attended: list[AttentionCall]) -> Map:
    body, head, last = own.model, own.lm_head.group, _norm(own.model.norm)
    layers = [_layer(*pair) for pair in zip(body.layers, attended, strict=True)]

    def compute(
        tokens: torch.Tensor, positions: torch.Tensor, current: SamplingPass, rows: torch.Tensor
    ) -> torch.Tensor:
        hidden = F.embedding(tokens, body.embed_tokens.weight)
        turn = _turn(*body.rotary_emb(hidden[None], positions[None]))
        for layer in layers:
            hidden = layer(hidden, turn, current)
        return current.multiply(head, last(hidden.index_select(0, rows)))

    return compute


def _layer(own: Any, call: AttentionCall) -> Map:
    """Return a layer: attention, whose queries and keys may be normalised, and a gated product."""
    attention, mlp = own.self_attn, own.mlp
    before, after = _norm(own.input_layernorm), _norm(own.post_attention_layernorm)
    mixing, out = attention.q_proj.group, attention.o_proj.group
    gated, down, activation = mlp.gate_proj.group, mlp.down_proj.group, mlp.act_fn.forward
    queries, few, width = call.query.shape[1], *call.key.shape[1:]
    norm: Map | None = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm] * queries + [attention.k_norm] * few
        norm = _norm(attention.q_norm, torch.stack([one.weight for one in norms]))

    def compute(rows: torch.Tensor, turn: Map, current: SamplingPass) -> torch.Tensor:
        mixed = current.multiply(mixing, before(rows)).view(len(rows), -1, width)
        turned = mixed[:, : queries + few]
        query, key = turn(turned if norm is None else norm(turned)).split((queries, few), 1)
        attending = replace(call, query=query, key=key, value=mixed[:, queries + few :])
        attended = current.attention.attend(attending).view(len(rows), -1)
        rows = current.multiply(out, attended).add_(rows)
        gate, up = current.multiply(gated, after(rows)).chunk(2, -1)
        return current.multiply(down, activation(gate).mul_(up)).add_(rows)

    return compute


def _norm(own: Any, weight: torch.Tensor | None = None) -> Map:
    factors = own.weight if weight is None else weight
    epsilon = factors.new_tensor(own.variance_epsilon)  # a tensor is added sooner than a number
    return lambda rows: (rows * (rows * rows).mean(-1, True).add_(epsilon).rsqrt_()).mul_(factors)


def _turn(cosines: torch.Tensor, sines: torch.Tensor) -> Map:
    """Return a function that rotates rows [tokens, heads, width]; both are [1, tokens, width]."""
    low, high = sines[0, :, None].chunk(2, -1)
    cosines, sines = cosines[0, :, None], torch.cat((-low, high), -1)
    return lambda rows: (rows * cosines).add_(rows.roll(len(low[0, 0]), -1).mul_(sines))
