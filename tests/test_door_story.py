"""The door over the engine: what the agent saw, what was journalled and what was sampled agree."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import tinker
from tinker import ModelInput

from adapters.calls import Completion, Policy, Sampling
from adapters.chat import Chat
from adapters.door.door import Door
from tasks.journal import Journal, read_spans, seal
from tasks.spans import call_span
from tests.engine_server import connected, serving

TINY = Path(__file__).parent.parent / "engine" / "tiny_chat"
ROLLOUT = "train-00000-0000-00"


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.SamplingClient]:
    with serving(TINY, tmp_path_factory.mktemp("state")) as address, connected(address) as service:
        yield service.create_sampling_client(base_model=str(TINY)).result()


def converse(client: openai.OpenAI) -> list[str]:
    """Four questions, the last one streamed; the client strips what it repeats."""
    messages, answers = [], []
    for number in range(3):
        messages.append({"role": "user", "content": f"What is {number} + 4?"})
        answer = client.chat.completions.create(model="policy", messages=messages)
        answers.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1].strip()})
    messages.append({"role": "user", "content": "Bye."})
    chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
    return [*answers, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


def played(sampler: tinker.SamplingClient, journal: Path, attempts: int) -> list[list[str]]:
    chat = Chat(sampler.get_tokenizer())
    with Journal(journal) as writing:

        async def record(completion: Completion) -> None:
            await writing.append(call_span(completion, "story"))

        with Door(chat, "token", record, Sampling(12, 1.0, 1.0, -1), run_seed=3) as door:
            door.policy = Policy(sampler, "00000")
            said = []
            for attempt in range(attempts):
                door.admit(ROLLOUT, attempt)
                url = door.url(ROLLOUT, attempt)
                with openai.OpenAI(base_url=url, api_key="token") as client:
                    said.append(converse(client))
                door.dismiss(ROLLOUT, attempt).result(5)
    return said


def test_a_conversation_with_the_engine(sampler: tinker.SamplingClient, tmp_path: Path) -> None:
    first, second = played(sampler, tmp_path / "j.jsonl", attempts=2)
    assert first == second, "a rollout that is started anew samples the same tokens"

    spans = read_spans(seal(tmp_path / "j.jsonl", tmp_path / "s.parquet")).to_pylist()
    assert [(span["attempt"], span["call"]) for span in spans] == [
        (attempt, call) for attempt in range(2) for call in range(4)
    ]
    assert [span["prefix_how"] for span in spans[:4]] == ["new", *["messages"] * 3]
    assert spans[3]["response_token_ids"] == spans[7]["response_token_ids"]

    for span in spans[:4]:
        prompt, sampled = span["prompt_token_ids"], span["response_token_ids"]
        scored = sampler.compute_logprobs(ModelInput.from_ints(prompt + sampled)).result()
        assert scored[len(prompt) :] == pytest.approx(span["logprobs"], abs=1e-3)


def test_the_engine_refuses_what_no_sampler_could_do(
    sampler: tinker.SamplingClient, tmp_path: Path
) -> None:
    async def record(_: Completion) -> None:
        raise AssertionError("there is nothing to record")

    chat = Chat(sampler.get_tokenizer(), context=10**6)
    with Door(chat, "token", record, Sampling(12, 1.0, 1.0, -1), run_seed=3) as door:
        door.policy = Policy(sampler, "00000")
        door.admit(ROLLOUT, 0)
        client = openai.OpenAI(base_url=door.url(ROLLOUT, 0), api_key="token")
        long = [{"role": "user", "content": "a cat " * 3000}]
        with client, pytest.raises(openai.BadRequestError, match="context") as error:
            client.chat.completions.create(model="policy", messages=long)  # pyright: ignore
    assert error.value.code == "sampler_refused"
