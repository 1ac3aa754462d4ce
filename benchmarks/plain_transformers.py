"""The peer of the engine: transformers, used as in its documentation."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

IGNORED = -100
"""The target that cross-entropy ignores."""


def load(folder: Path) -> PreTrainedModel:
    """Load a model in float32 with transformers' default attention (PyTorch's fused one)."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def generating(
    network: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Callable[[], None]:
    """Sample `new_tokens` for each prompt, all of one length, with the KV cache and no stops.

    `generate` returns no log-probabilities here, which saves a log-softmax per token.
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
    """Take one AdamW step on right-padded sequences, with next-token cross-entropy."""
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


class PeftStyleLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank update, written as in PEFT."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = 32 / rank
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + F.linear(F.linear(inputs, self.a), self.b) * self.scale


def with_lora(network: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Freeze a network and add a LoRA to every linear layer, the output layer included."""
    network.requires_grad_(False)
    linears = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    for name, module in linears:
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, PeftStyleLinear(module, rank))
    return network
