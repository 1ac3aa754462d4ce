"""Sampling and training by transformers, as its documentation does it: the engine's peer."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

IGNORED = -100
"""Target that cross-entropy leaves out."""


def load(folder: Path) -> PreTrainedModel:
    """Load a model in float32, with the attention that transformers chooses by itself."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def generating(
    network: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Callable[[], None]:
    """Return a function that samples `new_tokens` for each prompt with the KV cache.

    The prompts have one length, and nothing stops early. `generate` returns no log-probabilities
    here, which spares it a log-softmax a token.
    """
    config = network.generation_config
    config.eos_token_id = None
    config.pad_token_id = 0
    inputs = torch.tensor(prompts)
    whole = torch.ones_like(inputs)

    def generate() -> None:
        tokens = network.generate(  # pyright: ignore[reportCallIssue]
            input_ids=inputs,
            attention_mask=whole,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
        )
        assert tokens.shape == (len(prompts), inputs.shape[1] + new_tokens)

    return generate


def training(network: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Return a function that takes an AdamW step on right-padded sequences, by cross-entropy."""
    tokens, targets, mask = _padded(sequences)
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)
    network.train()

    def step() -> None:
        logits = network(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, targets and attention mask, each [sequences, longest - 1]."""
    width = max(map(len, sequences)) - 1
    tokens = torch.zeros((len(sequences), width), dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row, sequence in enumerate(sequences):
        length = len(sequence) - 1
        tokens[row, :length] = torch.tensor(sequence[:-1])
        targets[row, :length] = torch.tensor(sequence[1:])
    return tokens, targets, (targets != IGNORED).long()


class LoraLinear(nn.Module):
    """Frozen linear layer with a trainable low-rank update, as PEFT writes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = 32 / rank
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add the low-rank update to the frozen layer's output."""
        return self.base(inputs) + F.linear(F.linear(inputs, self.a), self.b) * self.scale


def with_lora(network: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Freeze a network and add a LoRA to every linear layer, the output layer included."""
    network.requires_grad_(False)
    linears = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    for name, module in linears:
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, LoraLinear(module, rank))
    return network
