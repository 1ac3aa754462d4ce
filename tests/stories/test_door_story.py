"""The door over the engine: what the agent saw, what was journalled and what was sampled agree."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import tinker
from tinker import ModelInput

from ratchet.adapters.calls import POLICY, Completion, Policy, Sampling
from ratchet.adapters.door.batches import DueRollout, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import ROLE
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.recording.journal import Journal, read_spans, seal
from ratchet.tasks.recording.spans import call_span
from tests.support.door.door_batches import ListRecorder, batch_at, begin
from tests.support.servers.engine_server import connected, serving

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
ROLLOUT = "train-00000-0000-00"
NAME = "train-00000.0"


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.SamplingClient]:
    with serving(TINY, tmp_path_factory.mktemp("state")) as address, connected(address) as service:
        yield service.create_sampling_client(base_model=str(TINY)).result()


def converse(client: openai.OpenAI) -> list[str]:
    """Ask four questions, the last one streamed; the client strips the answers that it repeats."""
    messages, answers = [], []
    for number in range(3):
        messages.append({"role": "user", "content": f"What is {number} + 4?"})
        answer = client.chat.completions.create(model="policy", messages=messages)
        answers.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1].strip()})
    messages.append({"role": "user", "content": "Bye."})
    chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
    return [*answers, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


class JournalledCalls(ListRecorder):
    """Recorder that writes completions to a journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__([DueRollout(ROLLOUT, {})])
        self._journal = journal

    async def answered(self, completion: Completion) -> None:
        span = {**call_span(completion), "run_id": "story"}
        await asyncio.wrap_future(self._journal.append(span))


@contextmanager
def opened(
    sampler: tinker.SamplingClient, recorder: ListRecorder, context: int | None = None
) -> Iterator[Callable[[], Batch]]:
    """Open a batch of one rollout, over the engine; yield what begins its next attempt."""
    sampled_by = SampledBy({POLICY: Policy(sampler, "00000")}, Sampling(12, 1.0, 1.0, -1))
    with (
        Door(Chat(sampler.get_tokenizer(), context=context), {}, run_seed=3) as door,
        door.opened(batch_at(door, NAME, recorder, sampled_by)) as token,
    ):
        yield lambda: begin(door, NAME, token)


def client_of(batch: Batch) -> openai.OpenAI:
    return openai.OpenAI(base_url=batch.url(ROLE, ROLLOUT), api_key=batch.key(ROLLOUT))


def played(sampler: tinker.SamplingClient, path: Path, attempts: int) -> list[list[str]]:
    said = []
    with Journal(path) as journal, opened(sampler, JournalledCalls(journal)) as begin_next:
        for _ in range(attempts):
            with client_of(begin_next()) as client:
                said.append(converse(client))
    return said


def test_a_conversation_with_the_engine(sampler: tinker.SamplingClient, tmp_path: Path) -> None:
    first, second = played(sampler, tmp_path / "j.jsonl", attempts=2)
    assert first == second, "a rollout that is started anew samples the same tokens"

    spans = read_spans(seal(tmp_path / "j.jsonl", tmp_path / "s.parquet")).to_pylist()
    assert [(span["attempt"], span["call"]) for span in spans] == [
        (attempt, call) for attempt in range(2) for call in range(4)
    ]
    assert [span["kept_how"] for span in spans[:4]] == ["new", *["messages"] * 3]
    assert spans[3]["response_token_ids"] == spans[7]["response_token_ids"]

    for span in spans[:4]:
        prompt, sampled = span["prompt_token_ids"], span["response_token_ids"]
        scored = sampler.compute_logprobs(ModelInput.from_ints(prompt + sampled)).result()
        assert scored[len(prompt) :] == pytest.approx(span["logprobs"], abs=1e-3)


def test_the_engine_refuses_what_no_sampler_could_do(sampler: tinker.SamplingClient) -> None:
    recorder = ListRecorder([DueRollout(ROLLOUT, {})])
    with opened(sampler, recorder, context=10**6) as begin_next, client_of(begin_next()) as client:
        long = [{"role": "user", "content": "a cat " * 20_000}]
        with pytest.raises(openai.BadRequestError, match="context") as error:
            client.chat.completions.create(model="policy", messages=long)  # pyright: ignore
    assert error.value.code == "sampler_refused"
    assert recorder.completions == []
