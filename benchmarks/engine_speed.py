"""Sampled and trained tokens per second of the engine and of transformers, one thread each."""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is in this repository
os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
import torch
import transformers

from adapters.tinker.service import Service, connect
from benchmarks import plain_transformers as plain
from benchmarks.measuring import SPEED, alternated, machine, speed_rows, table
from engine.model.base_models import find
from engine.model.language_model import LanguageModel
from engine.model.lora import LoraConfig, LoraWeights
from engine.sampling.requests import SampleRequest
from engine.sampling.scheduler import Scheduler
from engine.training.datums import TrainingDatum
from engine.training.trainer import AdamParams, Trainer

BASE = "local/tiny-chat"
PROMPT_TOKENS, NEW_TOKENS = 24, 64
RANK = 16
Run = Callable[[], object]
Sequences = list[list[int]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9, help="of each pair")
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print(machine())
    with tempfile.TemporaryDirectory() as state, connect(BASE, Path(state)) as service:
        for count in (1, 64, 128):
            print(sampling_table(service, count, rounds), flush=True)
        random = np.random.default_rng(0)
        even = texts(random, [65] * 64)
        print(training_table("64 sequences of 64 tokens", service, even, rounds), flush=True)
        ragged = texts(random, list(random.integers(17, 130, 64)))
        print(training_table("64 sequences of 16 to 128 tokens", service, ragged, rounds))


def sampling_table(service: Service, count: int, rounds: int) -> str:
    """Compare one batch of `generate` with as many requests to the engine."""
    prompts = texts(np.random.default_rng(1), [PROMPT_TOKENS] * count)
    by_transformers = plain.generating(plain.load(find(BASE).folder), prompts, NEW_TOKENS)
    with engine_sampling(prompts) as by_engine:
        took = alternated(
            {
                "transformers `generate`": by_transformers,
                "engine, in its process": by_engine,
                "engine, by the Tinker SDK": sdk_sampling(service, prompts),
            },
            rounds,
            service.engine,
        )
    title = f"Sampling, {count} at once: {PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new"
    rows = speed_rows(took, count * NEW_TOKENS, "transformers `generate`")
    return table(title, SPEED, rows)


@contextmanager
def engine_sampling(prompts: Sequences) -> Iterator[Run]:
    """Sample one request per prompt from a LoRA, as rollouts do."""
    model = LanguageModel.load(find(BASE).folder)
    lora = LoraWeights.initial(model, LoraConfig(RANK, seed=0)).frozen()
    scheduler = Scheduler(model)
    requests = [
        SampleRequest(prompt, max_tokens=NEW_TOKENS, seed=seed, stop=[])
        for seed, prompt in enumerate(prompts)
    ]

    def sample() -> None:
        for future in [scheduler.sample(request, lora) for request in requests]:
            assert len(future.result().sequences[0].tokens) == NEW_TOKENS

    try:
        yield sample
    finally:
        scheduler.close()


def sdk_sampling(service: Service, prompts: Sequences) -> Run:
    """Sample the same requests over HTTP from an engine in its own process."""
    trainer = service.result(
        service.client.create_lora_training_client(BASE, RANK, seed=0), "a training client"
    )
    sampler = service.result(trainer.save_weights_and_get_sampling_client(), "a sampler")
    inputs = [tinker.ModelInput.from_ints(prompt) for prompt in prompts]

    def params(seed: int) -> tinker.SamplingParams:
        return tinker.SamplingParams(max_tokens=NEW_TOKENS, seed=seed, stop=[])

    def sample() -> None:
        futures = [sampler.sample(one, 1, params(seed)) for seed, one in enumerate(inputs)]
        for future in futures:
            assert len(future.result().sequences[0].tokens) == NEW_TOKENS

    return sample


def training_table(what: str, service: Service, sequences: Sequences, rounds: int) -> str:
    folder = find(BASE).folder
    peer = f"transformers, LoRA of rank {RANK}"
    took = alternated(
        {
            peer: plain.training(plain.with_lora(plain.load(folder), RANK), sequences),
            "transformers, all weights": plain.training(plain.load(folder), sequences),
            "engine, in its process": engine_training(sequences),
            "engine, by the Tinker SDK": sdk_training(service, sequences),
        },
        rounds,
        service.engine,
    )
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    title = f"Training step: {what}, LoRA of rank {RANK}"
    return table(title, SPEED, speed_rows(took, tokens, peer))


def engine_training(sequences: Sequences) -> Run:
    """Train a LoRA: forward, backward and AdamW."""
    model = LanguageModel.load(find(BASE).folder)
    trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(RANK, seed=0)))
    datums = [TrainingDatum(sequence[:-1], loss_inputs(sequence)) for sequence in sequences]

    def step() -> None:
        trainer.forward_backward(datums, "cross_entropy")
        trainer.optim_step(AdamParams())

    return step


def sdk_training(service: Service, sequences: Sequences) -> Run:
    """Train over HTTP; both requests are sent before the first answer arrives."""
    trainer = service.result(
        service.client.create_lora_training_client(BASE, RANK, seed=0), "a training client"
    )
    datums = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(sequence[:-1]),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(values)
                for name, values in loss_inputs(sequence).items()
            },
        )
        for sequence in sequences
    ]

    def step() -> None:
        passed = trainer.forward_backward(datums, "cross_entropy")
        stepped = trainer.optim_step(tinker.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()

    return step


def loss_inputs(sequence: Sequence[int]) -> dict[str, np.ndarray]:
    """Return loss inputs in which every token but the first is a target."""
    targets = np.array(sequence[1:], dtype=np.int64)
    return {"target_tokens": targets, "weights": np.ones(len(targets), dtype=np.float32)}


def texts(random: np.random.Generator, lengths: Sequence[int]) -> Sequences:
    """Draw random tokens, because the content does not affect the speed."""
    return [random.integers(16, 1000, length).tolist() for length in lengths]


if __name__ == "__main__":
    main()
