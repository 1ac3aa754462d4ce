"""The durable tasks of pretraining: vocabulary, training in parts, scores, export, model card."""

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from pretraining import tokenizer as tokenizers
from pretraining import training_loop
from pretraining.corpora.conversation import Conversation
from pretraining.corpora.mixture import LAST_SHARES, Shares, examined_corpora, stream
from pretraining.exams import Answerer, play_exams
from pretraining.model_card import render_card
from pretraining.training_loop import Shape, TrainingState
from ratchet.durable.files import appearing_folder
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import write_text

MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Tokens of each phase, and the number of parts of the clean phase.

    The clean phase has right answers only. The sharp phase trains answers only. The noisy phase has
    the natural mistakes that RL is to remove. A part that is complete is not repeated.
    """

    clean: int = 12_000_000
    sharp: int = 4_000_000
    noisy: int = 1_500_000
    parts: int = 6


@dataclass(frozen=True, slots=True)
class Phase:
    """One schedule of learning rates, in parts whose results are kept.

    `peak` scales the learning rates of `training_loop`.
    """

    name: str
    tokens: int
    seed: int
    parts: int = 1
    noise: float = 0.0
    peak: float = 1.0
    prompt_weight: float = 0.0
    shares: Shares = field(default_factory=lambda: LAST_SHARES)


@durable
def train_vocabulary(path: Path, seed: int, size: int, conversations: int) -> None:
    """Train the tokenizer on conversations of the corpora."""
    read = islice(stream(f"{seed}/vocabulary", 0.5), conversations)
    tokenizer = tokenizers.train_tokenizer(_texts(read), size)
    with appearing_folder(path) as aside:
        tokenizer.save_pretrained(aside)


@durable
def create_model(path: Path, tokenizer: Path, shape: Shape, seed: int) -> None:
    """Create a model with random weights."""
    model = training_loop.new_model(shape, tokenizers.load_tokenizer(tokenizer), seed)
    with appearing_folder(path) as aside:
        TrainingState(model).save(aside)


@durable
def train_part(path: Path, tokenizer: Path, before: Path, phase: Phase, part: int) -> None:
    """Train the model on one more part; part 0 begins a new schedule of learning rates."""
    state = TrainingState.load(before, weights_only=part == 0)
    encoder = tokenizers.Encoder(tokenizers.load_tokenizer(tokenizer), phase.prompt_weight)
    seed = f"{phase.seed}/{path.name}"
    documents = (
        encoder.encode(conversation.messages, conversation.tools, conversation.ignored)
        for conversation in stream(seed, phase.noise, phase.shares)
    )
    until = phase.tokens * (part + 1) // phase.parts
    started = time.monotonic()
    for progress in training_loop.train(
        state, documents, tokens=phase.tokens, until=until, seed=seed, peak=phase.peak
    ):
        seconds = round(time.monotonic() - started, 1)
        row = {"name": path.name, **progress, "seconds": seconds}
        with path.with_name("progress.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
    with appearing_folder(path) as aside:
        state.save(aside)


@durable
def score_model(path: Path, tokenizer: Path, model: Path, games: int) -> None:
    """Write the mean reward and its standard error on held-out examples, for each corpus."""
    scores = dict[str, dict[str, float]]()
    loaded = tokenizers.load_tokenizer(tokenizer)
    with closing(Answerer(model, loaded, MAX_ANSWER_TOKENS)) as answerer:
        for name, corpus in examined_corpora().items():
            rewards = play_exams([corpus.exam(index) for index in range(games)], answerer)
            error = stdev(rewards) / sqrt(games) if games > 1 else 0.0
            scores[name] = {"mean": fmean(rewards), "error": error}
    write_text(path, json.dumps({"games": games, "scores": scores}, indent=2) + "\n")


@durable
def export_model(path: Path, tokenizer: Path, model: Path) -> None:
    """Export model and tokenizer to one Hugging Face folder in bfloat16."""
    with appearing_folder(path) as aside:
        training_loop.export(model, tokenizers.load_tokenizer(tokenizer), aside)


@durable
def write_card(path: Path, before: Path, after: Path) -> None:
    """Write the model card from two files of scores."""
    write_text(path, render_card(path.parents[1], path.parent, before, after, _machine()))


def _machine() -> str:
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores ({model})"


def _texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    """Yield the texts of conversations: messages, and tools as JSON."""
    for conversation in conversations:
        yield from (message["content"] for message in conversation.messages)
        yield from map(json.dumps, conversation.tools)
