"""Sampling and training speed of the engine beside plain transformers, one thread each."""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is this repository's
os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import pyarrow as pa
import tinker
import torch
import transformers

from adapters.tinker.live_policy import LivePolicy, LoraSpec
from adapters.tinker.service import Service, connect
from benchmarks.measuring import SPEED, describe_machine, format_table, speed_rows, time_in_turns
from benchmarks.peers import plain_transformers as plain
from engine.model.base_models import find
from engine.model.language_model import LanguageModel
from engine.model.lora import LoraConfig, LoraWeights
from engine.sampling.requests import SampleRequest
from engine.sampling.scheduler import Scheduler
from engine.training.datums import TrainingDatum
from engine.training.trainer import AdamParams, Trainer
from tasks.algorithm.update_method import UpdateMethod
from tasks.datums import SCHEMA, to_datums

BASE = "local/tiny-chat"
PROMPT_TOKENS, NEW_TOKENS = 24, 64
RANK = 16
Run = Callable[[], object]
Sequences = list[list[int]]


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9, help="of each pair")
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as state, connect(BASE, Path(state)) as service:
        for count in (1, 64, 128):
            print(compare_sampling(service, count, rounds), flush=True)
        random = np.random.default_rng(0)
        even = make_sequences(random, [65] * 64)
        print(compare_training("64 sequences of 64 tokens", service, even, rounds), flush=True)
        ragged = make_sequences(random, list(random.integers(17, 130, 64)))
        print(compare_training("64 sequences of 16 to 128 tokens", service, ragged, rounds))
        print(compare_losses(service, even, rounds))


def compare_sampling(service: Service, count: int, rounds: int) -> str:
    """Sample `count` prompts as one batch of `generate`, and as requests of the engine."""
    prompts = make_sequences(np.random.default_rng(1), [PROMPT_TOKENS] * count)
    by_transformers = plain.generating(plain.load(find(BASE).folder), prompts, NEW_TOKENS)
    with sampling_in_engine(prompts) as by_engine:
        took = time_in_turns(
            {
                "transformers `generate`": by_transformers,
                "engine, in its process": by_engine,
                "engine, by the Tinker SDK": sampling_by_sdk(service, prompts),
            },
            rounds,
            service.server.process,
        )
    title = f"Sampling, {count} at once: {PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new"
    rows = speed_rows(took, count * NEW_TOKENS, "transformers `generate`")
    return format_table(title, SPEED, rows)


@contextmanager
def sampling_in_engine(prompts: Sequences) -> Iterator[Run]:
    """Yield a function that samples in this process: a request a prompt, with a LoRA."""
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


def sampling_by_sdk(service: Service, prompts: Sequences) -> Run:
    """Return a function that samples from an engine in another process, over HTTP."""
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


def compare_training(what: str, service: Service, sequences: Sequences, rounds: int) -> str:
    """Take training steps on `sequences`, with and without a LoRA, by each program."""
    folder = find(BASE).folder
    peer = f"transformers, LoRA of rank {RANK}"
    took = time_in_turns(
        {
            peer: plain.training(plain.with_lora(plain.load(folder), RANK), sequences),
            "transformers, all weights": plain.training(plain.load(folder), sequences),
            "engine, in its process": training_in_engine(sequences),
            "engine, by the Tinker SDK": training_by_sdk(service, sequences),
        },
        rounds,
        service.server.process,
    )
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    title = f"Training step: {what}, LoRA of rank {RANK}"
    return format_table(title, SPEED, speed_rows(took, tokens, peer))


def training_in_engine(sequences: Sequences) -> Run:
    """Return a function that takes a training step of the LoRA in this process."""
    model = LanguageModel.load(find(BASE).folder)
    trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(RANK, seed=0)))
    datums = [TrainingDatum(sequence[:-1], loss_inputs(sequence)) for sequence in sequences]

    def step() -> None:
        trainer.forward_backward(datums, "cross_entropy")
        trainer.optim_step(AdamParams())

    return step


def training_by_sdk(service: Service, sequences: Sequences) -> Run:
    """Return a function that takes a training step over HTTP, both requests under way at once."""
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


def compare_losses(service: Service, sequences: Sequences, rounds: int) -> str:
    """Update a LoRA by losses of the service, and by losses by weights."""
    rows = [_sampled_row(sequence) for sequence in sequences]
    batch = pa.Table.from_pylist(rows, schema=SCHEMA)
    took = time_in_turns(
        {loss: updating_by(service, batch, loss) for loss in ("ppo", "gspo", "dual_clip", "topr")},
        rounds,
        service.server.process,
    )
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    title = "Update by a loss: ppo and gspo are the service's own, dual_clip and topr by weights"
    return format_table(title, SPEED, speed_rows(took, tokens, "ppo"))


def _sampled_row(sequence: Sequence[int]) -> dict[str, object]:
    """Make a row of a training batch, of which every target was sampled."""
    count = len(sequence) - 1
    return {
        "tokens": sequence[:-1],
        "targets": sequence[1:],
        "logprobs": [-7.0] * count,
        "advantages": [1.0] * count,
        "mask": [1] * count,
        "scale": 1.0,
    }


def updating_by(service: Service, batch: pa.Table, loss: str) -> Run:
    """Return a function that updates a policy on a batch by a loss."""
    lora = LoraSpec(BASE, RANK, 0, train_attn=True, train_mlp=True, train_unembed=True)
    create = service.client.create_lora_training_client
    live = LivePolicy(service, service.create("a training client", create, **vars(lora)))
    request = UpdateMethod(loss, {}, tinker.AdamParams(learning_rate=1e-5)).request(0)
    datums = to_datums(batch, loss)
    return lambda: live.result(live.submit(0, [datums], request))


def loss_inputs(sequence: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the inputs of the loss: every token but the first is a target."""
    targets = np.array(sequence[1:], dtype=np.int64)
    return {"target_tokens": targets, "weights": np.ones(len(targets), dtype=np.float32)}


def make_sequences(random: np.random.Generator, lengths: Sequence[int]) -> Sequences:
    """Make sequences of random tokens."""
    return [random.integers(16, 1000, length).tolist() for length in lengths]


if __name__ == "__main__":
    main()
