"""Rollouts through the real path, and what the sampler itself knows of their calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from tinker import ModelInput, SampleResponse, SamplingParams

from adapters.calls import POLICY, Completion, Place, Policy, Sampler, Sampling
from adapters.chat import Chat
from adapters.door.door import Door
from tasks.journal import Journal, read_spans, seal
from tasks.spans import call_span, reward_span
from tasks.trajectories import assemble

RUN_SEED = 11
TOKEN = "a-token-of-this-run"
MOST_CALLS = 200


def seed(rollout_id: str, call: int) -> int:
    """With which the policy's `call`-th answer of a rollout is sampled."""
    return Place(rollout_id, 0, POLICY, call).seed(RUN_SEED)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One call, as the sampler knows it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


Calls = dict[str, dict[int, Sampled]]
"""Rollout → the policy's calls, by their numbers."""


class Witness:
    """A sampler that keeps what another one was asked and gave, by the seed of the call."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._sampled: dict[int | None, Sampled] = {}

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        response = await self._sampler.sample(prompt, num_samples, sampling_params)
        (sequence,) = response.sequences
        assert sequence.logprobs is not None
        self._sampled[sampling_params.seed] = Sampled(
            prompt.to_ints(),
            [int(token) for token in sequence.tokens],
            [float(logprob) for logprob in sequence.logprobs],
        )
        return response

    def calls(self, rollouts: Sequence[str]) -> Calls:
        """All that was sampled, by whose it was."""
        calls = {
            rollout: {
                call: self._sampled[own]
                for call in range(MOST_CALLS)
                if (own := seed(rollout, call)) in self._sampled
            }
            for rollout in rollouts
        }
        assert sum(map(len, calls.values())) == len(self._sampled)
        return calls


class Witnessed:
    """Rollouts played through the door, the journal, its Parquet and the assembly."""

    def __init__(
        self,
        folder: Path,
        rollouts: Sequence[str],
        sampler: Sampler,
        chat: Chat,
        play: Callable[[Door], None],
    ) -> None:
        witness, now = Witness(sampler), datetime.now(UTC)
        with Journal(folder / "journal.jsonl") as journal:

            async def record(completion: Completion) -> None:
                await journal.append(call_span(completion))

            with Door(chat, TOKEN, record, Sampling(200, 1.0, 1.0, -1), RUN_SEED) as door:
                door.policy = Policy(witness, "v0")  # pyright: ignore[reportArgumentType]
                for rollout in rollouts:
                    door.admit(rollout, 0)
                play(door)
            for rollout in rollouts:
                journal.append_soon(reward_span(rollout, 0, 1.0, now, now))
        parquet = seal(folder / "journal.jsonl", folder / "spans.parquet")
        self.calls = witness.calls(rollouts)
        self.spans: pa.Table = read_spans(parquet)
        self.trajectories: pa.Table = assemble(parquet)
