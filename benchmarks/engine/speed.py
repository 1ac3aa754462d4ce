"""Sampling and training speed of the engine beside its peers, on the same cores.

The peers are plain transformers and, where `make llama` has installed it, llama.cpp. Each program
has a thread a core: torch's own in transformers, and the engine's workers. All of them compute in
float32; only the engine adds a LoRA to what it samples from. The bound is what the fastest product
of the model's layers reaches on as many cores.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is this repository's
os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import pyarrow as pa
import tinker
import torch
import transformers

from benchmarks.engine import plain_transformers as plain
from benchmarks.engine.llama.process import PYTHON, Limits, Llama, start_llama
from benchmarks.engine.llama.weights import write_gguf
from benchmarks.engine.random_bases import SHAPES, write_base
from benchmarks.measuring import (
    SPEED,
    Comparison,
    describe_machine,
    format_table,
    note,
    paired_ratio,
    speed_rows,
    time_in_turns,
)
from ratchet.adapters.tinker.live_policy import LivePolicy, LoraSpec
from ratchet.adapters.tinker.service import Service, connect
from ratchet.engine.__main__ import default_threads
from ratchet.engine.model.base_models import TINY_CHAT, find
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.model.products import Workers
from ratchet.engine.sampling.requests import SampleRequest
from ratchet.engine.sampling.scheduler import Scheduler
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import AdamParams, Trainer
from ratchet.tasks.datums import DATUM_SCHEMA, UpdateMethod, to_datums
from ratchet.tasks.settings.run import Optimizer

LLAMA = "llama.cpp"
IN_PROCESS, BY_SDK = "engine, in its process", "engine, by the Tinker SDK"
BOUND_ROWS = 2048
PROMPT_TOKENS, NEW_TOKENS = 24, 64
RANK = 16
Run = Callable[[], object]
Sequences = list[list[int]]


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9, help="of each pair")
    options.add_argument("--base", default=TINY_CHAT, help="base model; losses need the default")
    options.add_argument("--random", choices=SHAPES, help="shape of a random base model instead")
    options.add_argument("--at-once", type=int, nargs="*", default=[1, 64, 128], help="answers")
    options.add_argument("--sequences", type=int, default=64, help="of a training step")
    options.add_argument("--cores", type=int, default=default_threads(), help="of each program")
    llama = argparse.BooleanOptionalAction
    options.add_argument("--llama", action=llama, default=PYTHON.exists(), help="as a peer")
    arguments = options.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print(describe_machine(), flush=True)
    with (
        tempfile.TemporaryDirectory() as temporary,
        open_base(arguments, Path(temporary)) as measured,
    ):
        for count in arguments.at_once:
            print(compare_sampling(measured, count), flush=True)
        random = np.random.default_rng(0)
        count = arguments.sequences
        even = make_sequences(random, [65] * count)
        ragged = make_sequences(random, list(random.integers(17, 130, count)))
        for lengths, sequences in (("64", even), ("16 to 128", ragged)):
            what = f"{count} sequences of {lengths} tokens"
            print(compare_training(measured, what, sequences), flush=True)
        if measured.base == TINY_CHAT:
            print(compare_losses(measured, even))


@dataclass(frozen=True)
class Measured:
    """What is measured: a base model, in this process and in the engine behind a service."""

    base: str
    folder: Path
    service: Service
    rounds: int
    model: LanguageModel
    weights: Path | None
    """The GGUF file that llama.cpp reads, if it takes part."""

    def table(
        self,
        title: str,
        runs: Mapping[str, Run],
        tokens: int,
        passes: int = 0,
        llama: Llama | None = None,
    ) -> str:
        """Time programs in turns, beside the first; with `passes` of each token, say the bound."""
        servers = [self.service.server.process, llama and llama.process]
        took = time_in_turns(dict(runs), self.rounds, [one for one in servers if one is not None])
        table = format_table(title, SPEED, speed_rows(took, tokens, next(iter(runs))))
        if not passes:
            return table
        reached = 2 * self.model.size * passes / median(one.wall for one in took[IN_PROCESS])
        bound = measure_bound(self.model)
        peer, *_ = walls = {name: [one.wall for one in rounds] for name, rounds in took.items()}
        of_bound = f"{reached / bound:.0%} of what products of its layers reach"
        ours, theirs = walls[IN_PROCESS], walls[peer]
        note(Comparison(title, ours, peer, theirs, tokens, "tokens", of_bound))
        table += (
            f"\nIn its process the engine does {reached / 1e9:.0f} GFLOP/s, "
            f"{reached / bound:.0%} of the {bound / 1e9:.0f} that products of its layers reach.\n"
        )
        if llama is None:
            return table
        own, by_sdk = (paired_ratio(walls[LLAMA], walls[name]) for name in (IN_PROCESS, BY_SDK))
        return f"{table}It has {own:.2f} of llama.cpp's speed, and {by_sdk:.2f} by the SDK.\n"


@contextmanager
def open_base(arguments: argparse.Namespace, folder: Path) -> Iterator[Measured]:
    """Open the base model in this process and behind a service, which keeps its state in `folder`.

    A random base model, and the weights that llama.cpp reads, are written into `folder` too.
    """
    base, weights = arguments.base, None
    if arguments.random:
        base = str(folder / arguments.random)
        write_base(SHAPES[arguments.random], Path(base))
    source = find(base).folder
    if arguments.llama:
        weights = folder / "weights.gguf"
        write_gguf(source, weights)
    with connect(base, folder / "state") as service:
        model = load(source, arguments.cores)
        yield Measured(base, source, service, arguments.rounds, model, weights)


def load(folder: Path, cores: int) -> LanguageModel:
    """Load a model into this process, with a worker a core."""
    model = LanguageModel.load(folder)
    model.workers = Workers(cores)
    return model


def measure_bound(model: LanguageModel) -> float:
    """Return the floating-point operations a second of products of the layers with many rows.

    Each core has rows of its own. The best of three measurements counts.
    """
    groups = {group.weight.shape: group for group in model.groups}.values()
    rows = [torch.randn(BOUND_ROWS, group.weight.shape[1]) for group in groups]

    def multiply(part: int) -> None:
        del part
        for inputs, group in zip(rows, groups, strict=True):
            model.products.multiply(inputs, group.packed)

    seconds = []
    for _ in range(4):  # the first one warms up
        begun = time.perf_counter()
        model.workers.compute(multiply, range(model.workers.count))
        seconds.append(time.perf_counter() - begun)
    weights = sum(group.weight.numel() for group in groups)
    return 2 * weights * BOUND_ROWS * model.workers.count / min(seconds[1:])


def compare_sampling(measured: Measured, count: int) -> str:
    """Sample `count` prompts as one batch of each peer, and as requests of the engine."""
    prompts = make_sequences(np.random.default_rng(1), [PROMPT_TOKENS] * count)
    network = plain.load(measured.folder)
    generate = plain.generating(network, prompts, NEW_TOKENS)
    runs: dict[str, Run] = {
        "transformers `generate`": on_all_cores(measured.model.workers.count, generate)
    }
    with start_peer(measured, count) as llama:
        if llama is not None:
            runs[LLAMA] = lambda: llama.sample(prompts, NEW_TOKENS)
        runs[IN_PROCESS] = sampling_in_engine(measured.model, prompts)
        runs[BY_SDK] = sampling_by_sdk(measured, prompts)
        title = f"Sampling, {count} at once: {PROMPT_TOKENS} tokens of prompt, {NEW_TOKENS} new"
        passes = count * (PROMPT_TOKENS + NEW_TOKENS - 1)
        return measured.table(title, runs, count * NEW_TOKENS, passes, llama)


def start_peer(measured: Measured, sequences: int) -> AbstractContextManager[Llama | None]:
    """Start llama.cpp for as many sequences, if it takes part."""
    if measured.weights is None:
        return nullcontext()
    cores = measured.model.workers.count
    return start_llama(Limits(str(measured.weights), cores, sequences, PROMPT_TOKENS + NEW_TOKENS))


def on_all_cores(cores: int, run: Run) -> Run:
    """Return a function that runs with a thread a core, which end with the run.

    While a process has more OpenMP threads than there are cores, all of them sleep between
    operations, so that one program's would delay another's.
    """

    def run_apart() -> None:
        with ThreadPoolExecutor(1, "run", lambda: torch.set_num_threads(cores)) as thread:
            thread.submit(run).result()

    return run_apart


def sampling_in_engine(model: LanguageModel, prompts: Sequences) -> Run:
    """Return a function that samples in this process: a request a prompt, with a LoRA.

    The LoRA is another one each time, so that nothing is known of the prompts.
    """
    lora = LoraWeights.initial(model, LoraConfig(RANK, seed=0)).frozen()
    requests = [
        SampleRequest(prompt, max_tokens=NEW_TOKENS, seed=seed, stop=[])
        for seed, prompt in enumerate(prompts)
    ]

    def sample() -> None:
        fresh = lora.frozen()
        with closing(Scheduler(model)) as scheduler:
            for future in [scheduler.sample(request, fresh) for request in requests]:
                assert len(future.result().sequences[0].tokens) == NEW_TOKENS

    return sample


def sampling_by_sdk(measured: Measured, prompts: Sequences) -> Run:
    """Return a function that samples from an engine in another process, over HTTP."""
    service = measured.service
    trainer = service.result(
        service.client.create_lora_training_client(measured.base, RANK, seed=0), "a client"
    )
    inputs = [tinker.ModelInput.from_ints(prompt) for prompt in prompts]

    def params(seed: int) -> tinker.SamplingParams:
        return tinker.SamplingParams(max_tokens=NEW_TOKENS, seed=seed, stop=[])

    def sample() -> None:
        sampler = service.result(trainer.save_weights_and_get_sampling_client(), "a sampler")
        futures = [sampler.sample(one, 1, params(seed)) for seed, one in enumerate(inputs)]
        for future in futures:
            assert len(future.result().sequences[0].tokens) == NEW_TOKENS

    return sample


def compare_training(measured: Measured, what: str, sequences: Sequences) -> str:
    """Take training steps of a LoRA on `sequences`, by each program.

    A token is multiplied with each weight in the forward pass, and again for its gradient.
    """
    network = plain.with_lora(plain.load(measured.folder), RANK)
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    return measured.table(
        f"Training step: {what}, LoRA of rank {RANK}",
        {
            "transformers": on_all_cores(
                measured.model.workers.count, plain.training(network, sequences)
            ),
            IN_PROCESS: training_in_engine(measured.model, sequences),
            BY_SDK: training_by_sdk(measured, sequences),
        },
        tokens,
        2 * tokens,
    )


def training_in_engine(model: LanguageModel, sequences: Sequences) -> Run:
    """Return a function that takes a training step of the LoRA in this process."""
    trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(RANK, seed=0)))
    datums = [TrainingDatum(sequence[:-1], loss_inputs(sequence)) for sequence in sequences]

    def step() -> None:
        trainer.forward_backward(datums, "cross_entropy")
        trainer.optim_step(AdamParams())

    return step


def training_by_sdk(measured: Measured, sequences: Sequences) -> Run:
    """Return a function that takes a training step over HTTP, both requests under way at once."""
    service = measured.service
    trainer = service.result(
        service.client.create_lora_training_client(measured.base, RANK, seed=0), "a client"
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


def compare_losses(measured: Measured, sequences: Sequences) -> str:
    """Update a LoRA by losses of the service, and by losses by weights."""
    rows = [_sampled_row(sequence) for sequence in sequences]
    batch = pa.Table.from_pylist(rows, schema=DATUM_SCHEMA)
    return measured.table(
        "Update by a loss: ppo and gspo are the service's own, dual_clip and topr by weights",
        {loss: updating_by(measured, batch, loss) for loss in ("ppo", "gspo", "dual_clip", "topr")},
        sum(len(sequence) - 1 for sequence in sequences),
    )


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


def updating_by(measured: Measured, batch: pa.Table, loss: str) -> Run:
    """Return a function that updates a policy on a batch by a loss."""
    service = measured.service
    lora = LoraSpec(measured.base, RANK, 0, train_attn=True, train_mlp=True, train_unembed=True)
    create = service.client.create_lora_training_client
    live = LivePolicy(service, service.create("a training client", create, **vars(lora)))
    method = UpdateMethod(loss, {}, Optimizer(learning_rate=1e-5), steps=1)
    units = [[datum] for datum in to_datums(batch, loss)]
    request = method.request(0, [units])
    return lambda: live.result(live.submit(0, request))


def loss_inputs(sequence: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the inputs of the loss: every token but the first is a target."""
    targets = np.array(sequence[1:], dtype=np.int64)
    return {"target_tokens": targets, "weights": np.ones(len(targets), dtype=np.float32)}


def make_sequences(random: np.random.Generator, lengths: Sequence[int]) -> Sequences:
    """Make sequences of random tokens."""
    return [random.integers(16, 1000, length).tolist() for length in lengths]


if __name__ == "__main__":
    main()
