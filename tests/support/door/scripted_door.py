"""A door whose policy says what a test tells it to: the real protocol, without a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from ratchet.adapters.calls import POLICY, Example, Policy, Sampling
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.door.backends import create_backends
from ratchet.adapters.door.batches import DueRollout, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.rendering.chat import Chat
from tests.support.door.door_batches import ListRecorder, batch_at, begin

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
BATCH = "train-00000.0"
GROUP = "train-00000-0000"


@dataclass(frozen=True)
class Scripted:
    """Sampler that answers the last message of the prompt with `answer` of it."""

    tokenizer: Any
    chat: Chat
    answer: Callable[[str], str]

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        asked = self.tokenizer.decode(prompt.to_ints())
        last = asked.rsplit("<|im_start|>", 2)[1].split("\n", 1)[1].rsplit("<|im_end|>", 1)[0]
        tokens = [*self.chat.encode(self.answer(last)), self.chat.stop_tokens[0]]
        logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
        return SampleResponse([SampledSequence("stop", "", np.array(tokens, np.int32), logprobs)])


class ScriptedDoor:
    """A door with a batch that is being played, and the calls that it has answered."""

    def __init__(self, batch: Batch, recorder: ListRecorder) -> None:
        self._batch = batch
        self.calls = recorder.completions

    def endpoints(self, rollout: int = 0) -> dict[str, Endpoint]:
        """Return where the agent of this rollout finds each role."""
        return self._batch.endpoints(rollout_name(rollout))

    def said(self, rollout: int = 0) -> list[str]:
        """Return what was said in a rollout, from its first message to its last answer."""
        calls = [c for c in self.calls if c.id.rollout_id == rollout_name(rollout)]
        return [m["content"] for m in [*calls[-1].request.messages, calls[-1].message]]


def rollout_name(rollout: int) -> str:
    """Name a rollout of the batch, by its number in its group."""
    return f"{GROUP}-{rollout:02d}"


@contextmanager
def scripted_door(
    answer: Callable[[str], str],
    roles: Mapping[str, str] | None = None,
    examples: Sequence[Example] = ({},) * 8,
) -> Iterator[ScriptedDoor]:
    """Open a door whose policy gives `answer` to the last thing it was told.

    `roles` are as in a recipe; a rollout is begun for each of `examples`.
    """
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chat = Chat(tokenizer)
    scripted: Any = Scripted(tokenizer, chat, answer)
    sampled_by = SampledBy({POLICY: Policy(scripted, "v0")}, Sampling(200, 1.0, 1.0, -1))
    recorder = ListRecorder(DueRollout(rollout_name(k), e) for k, e in enumerate(examples))
    with (
        Door(chat, create_backends(roles or {}, run_seed=7), run_seed=7) as door,
        door.opened(batch_at(door, BATCH, recorder, sampled_by)) as token,
    ):
        yield ScriptedDoor(begin(door, BATCH, token), recorder)
