"""The training loop of the tiny Qwen3 model.

Muon trains the matrices, because it learns these formats in fewer tokens than AdamW. AdamW trains
embeddings and norms.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pretraining.tokenizer import Document, token_id

BATCH_TOKENS = 4096
HEAD = 32
"""Dimensions of an attention head."""
PEAK_RATES = {"muon": 0.02, "adam": 0.004}
PADDING = 0
"""<|endoftext|>, the first special token, which no document contains."""
FLASH_FROM = 300
"""Row length from which the flash kernel is faster."""
BATCHES_SORTED = 24
"""Number of batches within which documents are sorted by length, to reduce padding."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The transformer's width, a multiple of 32, and its number of layers."""

    hidden: int = 128
    layers: int = 5


def new_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Create a model with random weights; its vocabulary is padded to a multiple of 32."""
    torch.manual_seed(seed)
    heads = shape.hidden // HEAD
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 31) // 32 * 32,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD,
        intermediate_size=3 * shape.hidden,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, "<|im_end|>"),
        pad_token_id=PADDING,
    )
    config.update({"max_served_positions": 32768})  # for agents with long prompts, in the engine
    return Qwen3ForCausalLM(config)


class TrainingState:
    def __init__(self, model: Qwen3ForCausalLM) -> None:
        layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in layers}
        rest = [p for p in model.parameters() if id(p) not in known]
        self.model, self.steps, self.read = model, 0, 0
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(layers, lr=0.0, momentum=0.95, weight_decay=0.01),
            "adam": torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
        }

    def update(self, rate: float) -> None:
        """Clip the gradients to a norm of 1, apply them at `rate` times the peak, clear them."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for name, optimizer in self._optimizers.items():
            optimizer.param_groups[0]["lr"] = PEAK_RATES[name] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        """Save float32 weights as a Hugging Face folder, with the optimizers' state."""
        self.model.save_pretrained(folder)
        tensors = {
            f"{name}/{index}/{key}": tensor
            for name, optimizer in self._optimizers.items()
            for index, moments in optimizer.state_dict()["state"].items()
            for key, tensor in moments.items()
        }
        save_file(tensors, folder / "optimizers.safetensors")
        progress = {"steps": self.steps, "read": self.read}
        (folder / "progress.json").write_text(json.dumps(progress), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, weights_only: bool = False) -> "TrainingState":
        """Load a saved state, or its weights alone with new optimizers."""
        state = cls(Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32))
        if weights_only:
            return state
        tensors: dict[str, dict[int, dict[str, torch.Tensor]]] = {"muon": {}, "adam": {}}
        for path, tensor in load_file(folder / "optimizers.safetensors").items():
            name, index, key = path.split("/")
            tensors[name].setdefault(int(index), {})[key] = tensor
        for name, optimizer in state._optimizers.items():
            optimizer.load_state_dict(optimizer.state_dict() | {"state": tensors[name]})
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        state.steps, state.read = progress["steps"], progress["read"]
        return state


def train(
    state: TrainingState,
    documents: Iterator[Document],
    *,
    tokens: int,
    until: int,
    seed: str,
    peak: float = 1.0,
) -> Iterator[dict[str, float]]:
    """Train in place until `until` tokens are read; report every 20 steps.

    A report's loss is the mean since the report before. The schedule covers `tokens` tokens: the
    rate warms up over 2 % of them and falls linearly to 2 % from the middle on. `peak` scales every
    learning rate.
    """
    model, losses = state.model, list[float]()
    batches = _batches(documents, seed)
    model.train()
    while state.read < until:
        ids, weights = next(batches)
        loss = _loss(model, ids, weights)
        loss.backward()
        state.update(peak * _rate(state.read / tokens))
        state.read += int((ids != PADDING).sum())
        state.steps += 1
        losses.append(loss.item())
        if state.steps % 20 == 0 or state.read >= until:
            loss = sum(losses) / len(losses)
            yield {"step": state.steps, "tokens": state.read, "loss": loss}
            losses.clear()
    model.eval()


def export(folder: Path, tokenizer: PreTrainedTokenizerFast, shipped: Path) -> None:
    """Export a saved state to a Hugging Face folder in bfloat16, with the tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(shipped)
    tokenizer.save_pretrained(shipped)
    for file in shipped.iterdir():
        file.chmod(0o644)


def _rate(progress: float) -> float:
    """Return the learning rate relative to its peak, at a progress from 0 to 1."""
    return min(1.0, 0.02 + progress / 0.02, max(0.02, 2 * (1 - progress)))


def _loss(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the weighted mean loss; causal attention does not see the padding on the right."""
    trained = weights[:, 1:] > 0
    # For short rows the flash kernel's backward pass costs more than all matrix products.
    kernel = SDPBackend.MATH if ids.shape[1] < FLASH_FROM else SDPBackend.FLASH_ATTENTION
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(kernel):
        states = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(states[trained])
    each = F.cross_entropy(logits.float(), ids[:, 1:][trained], reduction="none")
    chosen = weights[:, 1:][trained]
    return (each * chosen).sum() / chosen.sum()


def _batches(
    documents: Iterator[Document], seed: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield right-padded ids and weights of about BATCH_TOKENS, of documents of similar length."""
    rng = random.Random(seed)
    while True:
        pool, size = list[Document](), 0
        while size < BATCH_TOKENS * BATCHES_SORTED:
            pool.extend(islice(documents, 64))
            size = sum(len(ids) for ids, _ in pool)
        pool.sort(key=lambda document: len(document[0]))
        batches = [list[Document]()]
        for document in pool:
            if (len(batches[-1]) + 1) * len(document[0]) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(document)
        rng.shuffle(batches)
        for batch in batches:
            ids, weights = zip(*batch, strict=True)
            yield _pad(ids, PADDING), _pad(weights, 0.0)


def _pad(rows: Sequence[Sequence[float]], filler: float) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)
