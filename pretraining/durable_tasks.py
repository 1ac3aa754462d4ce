"""Corpora → the base model that the engine ships: vocabulary, reading in parts, scores, card."""

import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from uuid import uuid4

from engine import documents, pretraining, vocabulary
from pretraining.answerer import Answerer
from pretraining.corpora.conversation import Conversation, Exam
from pretraining.corpora.mixture import LAST_SHARES, Shares, examined, stream
from pretraining.model_card import card
from pretraining.training_loop import Shape
from tasks.durability import durable
from tasks.files import append_line, write_text

MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read in one schedule of learning rates, in parts of which each is kept."""

    name: str
    tokens: int
    seed: int
    parts: int = 1
    noise: float = 0.0
    peak: float = 1.0
    """Of the learning rates, relative to those of `engine.pretraining`."""
    prompt_weight: float = 0.0
    shares: Shares = field(default_factory=lambda: LAST_SHARES)


@durable("vocabulary", "vocabulary")
def train_vocabulary(path: Path, seed: int, size: int, conversations: int) -> None:
    """corpora → tokenizer."""
    read = islice(stream(f"{seed}/vocabulary", 0.5), conversations)
    tokenizer = vocabulary.train_tokenizer(_texts(read), size)
    with _folder_appearing(path) as aside:
        tokenizer.save_pretrained(aside)


@durable("new", "new model")
def begin(path: Path, tokenizer: Path, shape: Shape, seed: int) -> None:
    """tokenizer → a model that has read nothing."""
    model = pretraining.new_model(shape, vocabulary.load_tokenizer(tokenizer), seed)
    with _folder_appearing(path) as aside:
        pretraining.Learner(model).save(aside)


@durable("{reading.name}-{part}", "read {reading.name}-{part}")
def read(path: Path, tokenizer: Path, before: Path, reading: Reading, part: int) -> None:
    """model → the model after one more part; part 0 begins a new schedule of learning rates."""
    learner = pretraining.Learner.load(before, afresh=part == 0)
    encoder = documents.Encoder(vocabulary.load_tokenizer(tokenizer), reading.prompt_weight)
    seed = f"{reading.seed}/{path.name}"
    texts = (
        encoder.encode(said.messages, said.tools, said.ignored)
        for said in stream(seed, reading.noise, reading.shares)
    )
    until = reading.tokens * (part + 1) // reading.parts
    started = time.monotonic()
    for progress in pretraining.pretrain(
        learner, texts, tokens=reading.tokens, until=until, seed=seed, peak=reading.peak
    ):
        seconds = round(time.monotonic() - started, 1)
        row = {"name": path.name, **progress, "seconds": seconds}
        append_line(path.with_name("progress.jsonl"), json.dumps(row))
    with _folder_appearing(path) as aside:
        learner.save(aside)


@durable("scores-{model.name}.json", "score {model.name}")
def score(path: Path, tokenizer: Path, model: Path, games: int) -> None:
    """model → mean reward and its standard error on held-out examples, for each format."""
    scores = dict[str, dict[str, float]]()
    with Answerer(model, vocabulary.load_tokenizer(tokenizer), MAX_ANSWER_TOKENS) as answerer:
        for name, format_ in examined().items():
            rewards = play([format_.exam(index) for index in range(games)], answerer)
            mean, error = mean_and_error(rewards)
            scores[name] = {"mean": mean, "error": error}
    write_text(path, json.dumps({"games": games, "scores": scores}, indent=2) + "\n")


@durable("shipped", "ship")
def ship(path: Path, tokenizer: Path, model: Path) -> None:
    """model, tokenizer → one Hugging Face folder in bfloat16."""
    with _folder_appearing(path) as aside:
        pretraining.ship(model, vocabulary.load_tokenizer(tokenizer), aside)


@durable("shipped/README.md", "describe")
def describe(path: Path, before: Path, after: Path) -> None:
    """Two files of scores → the model card."""
    write_text(path, card(path.parents[1], path.parent, before, after, _machine()))


def play(exams: list[Exam], answerer: Answerer) -> list[float]:
    """The rewards of all exams, played side by side; the n-th answers share one batch."""
    rewards = [0.0] * len(exams)
    prompts = {index: next(exam) for index, exam in enumerate(exams)}
    turn = 0
    while prompts:
        asked: list[Conversation] = list(prompts.values())
        answers = answerer.answer([(each.messages, each.tools) for each in asked], seed=turn)
        following = dict[int, Conversation]()
        for index, answer in zip(prompts, answers, strict=True):
            try:
                following[index] = exams[index].send(answer)
            except StopIteration as finished:
                rewards[index] = finished.value
        prompts, turn = following, turn + 1
    return rewards


def mean_and_error(rewards: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    return mean, math.sqrt(variance / len(rewards))


def _machine() -> str:
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores ({model})"


def _texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    for conversation in conversations:
        yield from (message["content"] for message in conversation.messages)
        yield from map(json.dumps, conversation.tools)


@contextmanager
def _folder_appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill; on a clean exit it becomes `folder`, whole."""
    aside = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.partial")
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
