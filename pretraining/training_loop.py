"""Documents → a tiny Qwen3 that has read them. With its vocabulary: what `ratchet pretrain` runs.

Matrices are trained by Muon, which learns these formats in fewer tokens than AdamW does, and
embeddings and norms by AdamW.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypedDict

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pretraining.tokenizer import token_id

Document = tuple[list[int], list[float]]
"""Tokens, and for each the weight of the loss of predicting it."""

BATCH_TOKENS = 4096
PADDING = 0
"""<|endoftext|>, the first special token, which no document holds."""
LONG = 300
"""Rows from which on the flash kernel is the faster one."""
BATCHES_SORTED = 24
"""Documents are sorted by length within this many batches, so that little is padding."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the transformer: its width, a multiple of 32, and its depth."""

    hidden: int = 128
    layers: int = 5

    @property
    def heads(self) -> int:
        """Of 32 dimensions each."""
        return self.hidden // 32

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 2)

    @property
    def mlp(self) -> int:
        return 3 * self.hidden


class Progress(TypedDict):
    step: int
    tokens: int
    loss: float


def new_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random weights; the vocabulary is padded to a multiple of 32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 31) // 32 * 32,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        intermediate_size=shape.mlp,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, "<|im_end|>"),
        pad_token_id=PADDING,
    )
    return Qwen3ForCausalLM(config)


class Learner:
    """A model with its optimizers and how far it has come."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in layers}
        rest = [p for p in model.parameters() if id(p) not in known]
        self.model, self.steps, self.read = model, 0, 0
        self._muon = torch.optim.Muon(layers, lr=0.0, momentum=0.95, weight_decay=0.01)
        self._adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    def set_rates(self, rate: float) -> None:
        """`rate` is 1 at the peak."""
        self._muon.param_groups[0]["lr"] = 0.02 * rate
        self._adam.param_groups[0]["lr"] = 0.004 * rate

    def update(self) -> None:
        """Apply and drop the gradients, cut to a norm of 1."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in (self._muon, self._adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        """Weights in float32, as a Hugging Face folder, with the optimizers' state beside them."""
        self.model.save_pretrained(folder)
        tensors = {
            f"{name}/{index}/{key}": tensor
            for name, optimizer in self._optimizers()
            for index, state in optimizer.state_dict()["state"].items()
            for key, tensor in state.items()
        }
        save_file(tensors, folder / "optimizers.safetensors")
        progress = {"steps": self.steps, "read": self.read}
        (folder / "progress.json").write_text(json.dumps(progress), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, afresh: bool = False) -> "Learner":
        """As saved; `afresh` takes the weights alone."""
        learner = cls(Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32))
        if afresh:
            return learner
        states: dict[str, dict[int, dict[str, torch.Tensor]]] = {"muon": {}, "adam": {}}
        for path, tensor in load_file(folder / "optimizers.safetensors").items():
            name, index, key = path.split("/")
            states[name].setdefault(int(index), {})[key] = tensor
        for name, optimizer in learner._optimizers():
            optimizer.load_state_dict(optimizer.state_dict() | {"state": states[name]})
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        learner.steps, learner.read = progress["steps"], progress["read"]
        return learner

    def _optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        return [("muon", self._muon), ("adam", self._adam)]


def pretrain(
    learner: Learner,
    documents: Iterator[Document],
    *,
    tokens: int,
    until: int,
    seed: str,
    peak: float = 1.0,
) -> Iterator[Progress]:
    """Train in place, of `tokens` in all, until `until` have been read; report every 20 steps.

    `peak` scales every learning rate. The rate warms up over 2 % of the tokens and falls linearly
    to 2 % from the middle on.
    """
    model, losses = learner.model, list[float]()
    batches = _batches(documents, seed)
    model.train()
    while learner.read < until:
        ids, weights = next(batches)
        learner.set_rates(peak * _rate(learner.read / tokens))
        loss = _loss(model, ids, weights)
        loss.backward()
        learner.update()
        learner.read += int((ids != PADDING).sum())
        learner.steps += 1
        losses.append(loss.item())
        if learner.steps % 20 == 0 or learner.read >= until:
            loss = sum(losses) / len(losses)
            yield Progress(step=learner.steps, tokens=learner.read, loss=loss)
            losses.clear()
    model.eval()


def ship(folder: Path, tokenizer: PreTrainedTokenizerFast, shipped: Path) -> None:
    """A learner's folder → a Hugging Face folder in bfloat16 with the tokenizer in it."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(shipped)
    tokenizer.save_pretrained(shipped)
    for file in shipped.iterdir():
        file.chmod(0o644)


def _rate(progress: float) -> float:
    return min(1.0, 0.02 + progress / 0.02, max(0.02, 2 * (1 - progress)))


def _loss(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Documents do not see each other: padding is on the right, where causal attention is blind."""
    learnt = weights[:, 1:] > 0
    # The flash kernel's backward costs more than all matrix products where rows are short.
    kernel = SDPBackend.MATH if ids.shape[1] < LONG else SDPBackend.FLASH_ATTENTION
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(kernel):
        states = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(states[learnt])
    each = F.cross_entropy(logits.float(), ids[:, 1:][learnt], reduction="none")
    wanted = weights[:, 1:][learnt]
    return (each * wanted).sum() / wanted.sum()


def _batches(
    documents: Iterator[Document], seed: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded ids and weights of about BATCH_TOKENS, documents of one length together."""
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
            yield _padded(batch)


def _padded(batch: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in batch)
    ids = [ids + [PADDING] * (width - len(ids)) for ids, _ in batch]
    weights = [weights + [0.0] * (width - len(weights)) for _, weights in batch]
    return torch.tensor(ids), torch.tensor(weights)
