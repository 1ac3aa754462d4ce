"""The engine with its products in bfloat16 and in float32, beside transformers' `generate`.

Speed of sampling and training in this process, and how far log-probabilities and a LoRA's gradient
move. The texts are this repository's documents, as random tokens would move them less.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import plain_transformers as plain
from benchmarks.engine.speed import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    RANK,
    Run,
    Sequences,
    loss_inputs,
    make_sequences,
    on_all_cores,
    sampling_in_engine,
    training_in_engine,
)
from benchmarks.measuring import SPEED, describe_machine, format_table, speed_rows, time_in_turns
from ratchet.engine.__main__ import default_threads
from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.base_models import find
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.model.products import Workers
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import Trainer

DOCUMENTS = Path(__file__).parents[2] / "docs"
LENGTH = 65
TYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--base", default="smollm2-135m", help="base model")
    options.add_argument("--rounds", type=int, default=5, help="of each pair")
    options.add_argument("--at-once", type=int, nargs="*", default=[1, 8, 32], help="answers")
    options.add_argument("--sequences", type=int, default=32, help="of a training step")
    options.add_argument("--cores", type=int, default=default_threads())
    arguments = options.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    torch.set_num_threads(1)
    print(describe_machine(), flush=True)
    folder = find(arguments.base).folder
    try:
        models = {dtype: LanguageModel.load(folder, dtype=dtype) for dtype in TYPES}
    except RequestRefused as refused:
        raise SystemExit(f"nothing to compare: {refused}") from None
    for model in models.values():
        model.workers = Workers(arguments.cores)
    for count in arguments.at_once:
        print(compare_sampling(models, folder, count, arguments.rounds), flush=True)
    texts = read_texts(models[torch.float32], arguments.sequences)
    runs = {_name(dtype): training_in_engine(model, texts) for dtype, model in models.items()}
    title = f"Training step: {len(texts)} sequences of {LENGTH - 1} tokens, LoRA of rank {RANK}"
    print(_table(title, runs, arguments.rounds, len(texts) * (LENGTH - 1)), flush=True)
    print(describe_differences(models, texts))


def compare_sampling(
    models: Mapping[torch.dtype, LanguageModel], folder: Path, count: int, rounds: int
) -> str:
    """Sample `count` random prompts at once by `generate` in float32, and by each model."""
    prompts = make_sequences(np.random.default_rng(1), [PROMPT_TOKENS] * count)
    title = f"Sampling, {count} at once: {PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new"
    cores = next(iter(models.values())).workers.count
    generate = plain.generating(plain.load(folder), prompts, NEW_TOKENS)
    runs = {"transformers `generate`": on_all_cores(cores, generate)}
    runs |= {_name(dtype): sampling_in_engine(model, prompts) for dtype, model in models.items()}
    return _table(title, runs, rounds, count * NEW_TOKENS)


def read_texts(model: LanguageModel, count: int) -> Sequences:
    """Return `count` sequences of LENGTH tokens of the documents."""
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    tokens = model.tokenizer(text[: 20 * count * LENGTH])["input_ids"]
    return [tokens[start : start + LENGTH] for start in range(0, count * LENGTH, LENGTH)]


def describe_differences(models: Mapping[torch.dtype, LanguageModel], texts: Sequences) -> str:
    """Say how log-probabilities of the texts, and the gradient of their loss, differ."""
    datums = [TrainingDatum(text[:-1], loss_inputs(text)) for text in texts]
    known, gradients = [], []
    for model in models.values():
        trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(RANK, seed=0)))
        outputs, _ = trainer.forward_backward(datums, "cross_entropy")
        known.append(np.concatenate(outputs))
        parts = trainer.sums.total().values()
        gradients.append(torch.cat([part.flatten().double() for part in parts]))
    exact, rounded = known
    moved = np.abs(rounded - exact)
    cosine = float(torch.cosine_similarity(*gradients, dim=0))
    return (
        f"In bfloat16 {len(moved):,} log-probabilities differ by {moved.mean():.4f} in the mean, "
        f"{np.quantile(moved, 0.99):.3f} in the 99th percentile and {moved.max():.3f} at most; "
        f"their mean is {exact.mean():.4f} and {rounded.mean():.4f}. "
        f"The cosine of the LoRA's gradients is {cosine:.5f}."
    )


def _table(title: str, runs: Mapping[str, Run], rounds: int, tokens: int) -> str:
    took = time_in_turns(dict(runs), rounds, [])
    return format_table(title, SPEED, speed_rows(took, tokens, next(iter(runs))))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
