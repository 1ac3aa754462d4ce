"""The base model: a frozen Hugging Face network whose LoRAs and caches are kept outside it."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.attention import (
    ATTENTION_NAME,
    CURRENT,
    AttentionCall,
    ForwardPass,
    LayerGroup,
    LayerKind,
    LoraLinear,
)
from ratchet.engine.model.products import (
    Products,
    TiledProducts,
    Workers,
    choose_products,
    tile_products,
)
from ratchet.engine.model.segments import Segment, SegmentAttention

TOLERANCE = 1e-3
"""Largest accepted difference between packed and original logits, relative to the largest logit."""

LARGEST_MERGED = 2**24
"""Number of weights in linear layers up to which LoRAs are merged for sampling: 64 MiB per LoRA."""


LAYER = re.compile(r"model\.layers\.\d+\.")
"""Beginning of the name of a weight in one of the network's layers."""


Loaded = Mapping[str, Collection[Any]]
"""What transformers says of the weights that it has loaded."""


def check_loaded(name: str, loaded: Loaded) -> None:
    """Refuse (RequestRefused) weights that do not fit the config.

    transformers makes up the weights that a config asks for and no file has in its shape, and
    leaves out the layers of a file that a config does not ask for.
    """
    facts = {
        "lacks": sorted(loaded["missing_keys"]),
        "has in another shape": sorted(str(key) for key, *_ in loaded["mismatched_keys"]),
        "has, and its config does not ask for,": sorted(
            key for key in loaded["unexpected_keys"] if LAYER.match(key)
        ),
    }
    for fact, keys in facts.items():
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RequestRefused(
                f"{name} contradicts itself: it {fact} {keys[0]}{more}; download all of its files "
                "again"
            )


class LanguageModel:
    """The base model: one network, its tokenizer and its limits."""

    def __init__(
        self,
        network: PreTrainedModel,
        name: str,
        source: str | Path | None = None,
        products: Products | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Freeze the network and replace its linear layers and its attention.

        The tokenizer is loaded from `source`, by default the name. Without `products`, the fastest
        sound kernel is chosen. The linear layers but the head multiply in `dtype`; everything else,
        LoRAs included, is float32. Raise RequestRefused if the packed network does not compute what
        the original network computes, or the processor has no sound products of `dtype`.
        """
        self.network = network.eval().requires_grad_(False)
        self.name = name
        self.source = str(source or name)
        self.config = network.config.get_text_config()
        self.device = next(network.parameters()).device
        self.workers = Workers()
        self.pause: Callable[[], None] = lambda: None
        """Callback between the microbatches of training, in which the scheduler samples."""
        probe = torch.arange(12, device=self.device) % self.vocab_size
        expected = self._plain_logits(probe)
        self.linears = _replace_linears(network)
        self._replace_attention()
        recorder = self._check_packed(probe, expected)
        self.attended = [recorder.attended[layer] for layer in sorted(recorder.attended)]
        """A call of each layer's attention."""
        _, heads, width = self.attended[0].key.shape
        self.cache_shape = len(self.attended), heads, width
        """Shape of one token's cache: (layers, heads, width)."""
        for layer in self.linears.values():
            if layer.kind != "unembedding":  # its logits need the digits
                layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
        self.groups = recorder.join_layers([*self.linears.values()])
        self.products = products or self._choose_products()
        for group in self.groups:
            group.packed = self.products.pack(group.weight)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "cpu",
        name: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "LanguageModel":
        """Load a folder or hub name; messages call the model `name`, by default the path."""
        network, loaded = cast(
            "tuple[PreTrainedModel, Loaded]",
            AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # they are refused below
                output_loading_info=True,
            ),
        )
        check_loaded(name or str(path), loaded)
        nn.Module.to(network, device)
        return cls(network, name or str(path), path, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; every id below is legal, even if no text encodes to it."""
        embedding = self.network.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        return embedding.num_embeddings

    @cached_property
    def merges(self) -> bool:
        """True if sampling adds each LoRA's update to a copy of the weights.

        Merged weights are faster but take the model's size in memory for each LoRA.
        """
        return isinstance(self.products, TiledProducts) and self.size <= LARGEST_MERGED

    @cached_property
    def size(self) -> int:
        """The number of weights in linear layers."""
        return sum(layer.weight.numel() for layer in self.linears.values())

    def _choose_products(self) -> Products:
        weights = [group.weight for group in self.groups]
        rounded = any(weight.dtype != torch.float32 for weight in weights)
        if self.size <= LARGEST_MERGED and not rounded:
            widths = (self.cache_shape[2], *(weight.shape[1] for weight in weights))
            return tile_products(weights, widths)
        chosen = choose_products(weights)
        if rounded and isinstance(chosen, TiledProducts):
            raise RequestRefused(
                f"this machine's products in {weights[0].dtype} give a row other bits beside other "
                f"rows, or it has none on {self.device}; leave --dtype out"
            )
        return chosen

    @property
    def read_context(self) -> int:
        """The longest text that the model has read in its pretraining."""
        return int(getattr(self.config, "max_position_embeddings", 2048))

    @property
    def max_context(self) -> int:
        """The longest prompt with its answer that is served, and the longest datum.

        A model's config says by `max_served_positions` if it is served beyond what it has read.
        """
        return max(self.read_context, int(getattr(self.config, "max_served_positions", 0)))

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.source)

    @cached_property
    def end_tokens(self) -> list[int]:
        """The end-of-text tokens of the generation config, or else of the model's config."""
        for config in (self.network.generation_config, self.config):
            ends = getattr(config, "eos_token_id", None)
            if ends is not None:
                return [ends] if isinstance(ends, int) else list(ends)
        return []

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        current: ForwardPass,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute float32 logits [n, vocabulary] of packed tokens and positions [n].

        With `rows`, compute the logits of those rows only.
        """
        mark = CURRENT.set(current)
        try:
            outputs = self.network(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            )
        finally:
            CURRENT.reset(mark)
        return outputs.logits[0].float()

    @torch.no_grad()
    def _plain_logits(self, probe: torch.Tensor) -> torch.Tensor:
        """Compute the original network's logits of the probe's two halves, one after the other."""
        halves = [self.network(half[None], use_cache=False) for half in probe.chunk(2)]
        return torch.cat([half.logits[0] for half in halves]).float()

    def _replace_attention(self) -> None:
        with suppress(ValueError):
            self.network.set_attn_implementation(ATTENTION_NAME)
        if self.config._attn_implementation != ATTENTION_NAME:
            raise RequestRefused(
                f"{self.name} ({type(self.network).__name__}) does not take attention functions "
                "from transformers' interface; choose another base model"
            )

    @torch.no_grad()
    def _check_packed(self, probe: torch.Tensor, expected: torch.Tensor) -> "_Recorder":
        """Compare packed with original logits, and record what the layers compute them from.

        The comparison detects any layer that mixes sequences or positions.
        """
        half = len(probe) // 2
        recorder = _Recorder(
            SegmentAttention([Segment(half), Segment(len(probe) - half)], self.device)
        )
        positions = torch.arange(half, device=self.device).repeat(2)
        found = self.logits(probe, positions, recorder)
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        shapes = {call.key.shape for call in recorder.attended.values()}
        if not error <= TOLERANCE or len(shapes) != 1:
            raise RequestRefused(
                f"{self.name} ({type(self.network).__name__}) cannot be served: its packed logits "
                f"differ from the original ones by {error:.1g} of their size, or its layers' "
                "caches differ in shape; choose another base model"
            )
        return recorder


class _Recorder:
    """A pass of the base model that records the shapes of keys, and which layers read one input."""

    def __init__(self, sequences: SegmentAttention) -> None:
        self.attention = self
        self.sequences = sequences
        self.attended: dict[int, AttentionCall] = {}
        self.calls: list[tuple[LoraLinear, torch.Tensor]] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.attended[call.layer] = call
        return self.sequences.attend(call)

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append((layer, inputs))
        return F.linear(inputs, layer.weight, layer.bias)

    def join_layers(self, layers: list[LoraLinear]) -> list[LayerGroup]:
        """Join the layers that were called with one tensor, one right after another."""
        runs = groupby(self.calls, key=lambda call: id(call[1]))
        called = [list(dict.fromkeys(layer for layer, _ in calls)) for _, calls in runs]
        groups: dict[LoraLinear, LayerGroup] = {}
        for members in [*called, *([layer] for layer in layers)]:
            if groups.keys().isdisjoint(members):
                groups |= dict.fromkeys(members, LayerGroup(members))
        return list(dict.fromkeys(groups[layer] for layer in layers))


def _replace_linears(network: PreTrainedModel) -> dict[str, LoraLinear]:
    """Replace every nn.Linear by a LoraLinear; return name → layer in the network's order."""
    head = network.get_output_embeddings()
    linears: dict[str, LoraLinear] = {}
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            attends = "attn" in name or "attention" in name
            kind: LayerKind = "unembedding" if module is head else "attention" if attends else "mlp"
            linears[name] = LoraLinear(module, name, kind)
            setattr(network.get_submodule(parent), leaf, linears[name])
    if not any(layer.kind == "attention" for layer in linears.values()):
        raise RequestRefused(
            f"{type(network).__name__} has no linear layers in its attention, so no LoRA can train "
            "it; choose another base model"
        )
    return linears
