"""A rollout batch of a test's own agent, played through the real door, journal and engine."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.adapters.calls import POLICY, Policy, Sampling
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import PatientSampler, Service
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.files import write_rows
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.servers.engine_server import TINY, tiny_chat_service

SAMPLING = Sampling(max_tokens=8, temperature=1.0, top_p=1.0, top_k=-1)
SHARD = "train-00000"
BATCH = f"{SHARD}.0"

PAIRS = ShardBatch(SHARD, 0, group_size=2)

Spans = list[dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """An engine with a sampler of an untrained LoRA."""

    service: Service
    sampler: PatientSampler
    chat: Chat

    def play(
        self,
        folder: Path,
        agent: Callable[..., Any] | str,
        examples: Sequence[dict[str, Any]] = ({"name": "a"},),
        batch: ShardBatch = PAIRS,
        max_calls: int | None = None,
        timeout_seconds: float = 60.0,
    ) -> Spans:
        """Play a batch in the run at `folder`; return the spans of its journal."""
        run = RunFolder(folder)
        shard = write_examples(run, examples)
        name = agent if isinstance(agent, str) else f"{agent.__module__}:{agent.__name__}"
        settings = PlaySettings(name, [POLICY], 4, timeout_seconds)
        with Door(self.chat, {}, run_seed=0, max_calls=max_calls) as door:
            server = RolloutHost(run, door, self.service, settings)
            collect_rollouts.make(
                run.spans(BATCH), shard, batch, server, self.sampled_by, play_batch
            )
        return read_journal(run.journal(BATCH))

    def sampled_by(self) -> SampledBy:
        return SampledBy({POLICY: Policy(self.sampler, "00000")}, SAMPLING)


def write_examples(run: RunFolder, examples: Sequence[dict[str, Any]]) -> Path:
    """Write a run's shard of one batch; return its path."""
    rows = [
        {"example_id": number, "example": example, "batch": 0}
        for number, example in enumerate(examples)
    ]
    shard = run.shard(SHARD)
    shard.parent.mkdir(parents=True, exist_ok=True)
    write_rows(shard, rows)
    return shard


def service_without_engine() -> Service:
    """Return the service of a run whose samplers are the test's own."""
    nothing: Any = None
    return Service(nothing, TinkerServer(None, None, Future(), None))


@contextmanager
def open_stage(state: Path) -> Iterator[Stage]:
    """Start an engine, and save the untrained LoRA that is sampled."""
    with tiny_chat_service(state) as service:
        create = service.client.create_lora_training_client
        training = create(base_model=str(TINY), rank=2, seed=0).result()
        sampler = service.sampler(training.save_weights_for_sampler("0").result().path)
        yield Stage(service, sampler, Chat(service.tokenizer_of(sampler)))


def ends(spans: Spans) -> list[dict[str, Any]]:
    """Return the spans that end rollouts, by rollout and attempt."""
    ended = [span for span in spans if span["kind"] in ("reward", "error")]
    return sorted(ended, key=lambda span: (span["rollout_id"], span["attempt"]))
