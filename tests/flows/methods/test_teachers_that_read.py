"""Teachers that read before a conversation what the policy does not."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.calls import POLICY, Message
from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.service import Service
from ratchet.engine.model.base_models import find
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.examples.reading import read_before
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.scoring import Reads, References, compute_references
from ratchet.tasks.settings.algorithm import Teacher
from ratchet.tasks.storage.files import write_rows
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import arrays, read_table, write_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, train_whole
from tests.support.servers.dying_engine import dying_in_update
from tests.support.servers.engine_server import TINY, tiny_chat_service
from tests.tasks.test_trajectories import call, reward

TWICE = "You are $identity. You are ${identity}."
QUESTION: Message = {"role": "user", "content": "Who are you?"}
AGAIN: Message = {"role": "user", "content": "Who?"}
TWICE_TOLD: Message = {"role": "system", "content": "You are a duck. You are a duck."}


def told(text: str = TWICE, **changes: Any) -> Recipe:
    teacher = {"models": ["base"], "reads": text}
    return small_recipe(
        **{
            "rollouts": {"groups": 4, "group_size": 1, "max_tokens": 16},
            "algorithm": {"preset": "on_policy_distill", "teacher": teacher},
        }
        | changes
    )


@pytest.fixture(scope="module")
def of_itself(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None, no_tinker: None
) -> Iterator[RunFolder]:
    """A run of two steps whose teacher is its own base, which is told who it is."""
    with train_whole(told(), tmp_path_factory.mktemp("runs")) as run:
        yield run


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with tiny_chat_service(tmp_path_factory.mktemp("state")) as served:
        yield served


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(AutoTokenizer.from_pretrained(find("local/tiny-chat").folder))


def test_sampled_tokens_are_scored_as_they_are_behind_what_the_teacher_reads(
    of_itself: RunFolder, service: Service, chat: Chat
) -> None:
    base = service.base_sampler(str(TINY))
    spans = read_table(of_itself.spans("train-00001.0")).to_pylist()
    calls = {span["rollout_id"]: span for span in spans if span["kind"] == "llm"}
    identities = [row["example"]["identity"] for row in read_shard(of_itself.shard("train-00001"))]
    scored = read_table(of_itself.references(POLICY, 1, "teachers")).to_pylist()
    for identity, row in zip(identities, scored, strict=True):
        said = calls[row["rollout_id"]]
        before: Message = {"role": "system", "content": f"You are {identity}. You are {identity}."}
        prompt = chat.render([before, *json.loads(said["messages"])], [])
        answer = said["response_token_ids"]
        [expected] = base.score([[*prompt, *answer]], [len(answer)])
        assert row["logprobs"][-len(answer) :] == pytest.approx(expected, abs=1e-5)


@pytest.mark.story
def test_a_run_whose_teacher_reads_dies_and_goes_on_as_if_it_had_not(of_itself: RunFolder) -> None:
    broken = die_and_go_on(told(), dying_in_update(1), of_itself.path.parent)
    assert differences(broken, of_itself) == []


class Asked:
    """A reference that keeps what it is asked, and gives every token its place as its score."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        self.sequences = [[*one] for one in sequences]
        return [
            np.arange(len(one), dtype=np.float32)[-count:]
            for one, count in zip(sequences, last, strict=True)
        ]


def asked_of(
    folder: Path, chat: Chat, calls: Sequence[dict[str, Any]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the sequences that a teacher scores for recorded calls, and its scores."""
    shard, spans = folder / "train-00000.jsonl", folder / "spans.parquet"
    write_rows(shard, [{"example_id": 0, "example": {"identity": "a duck"}, "batch": 0}])
    write_table(spans_table([*calls, reward(1.0)]), spans)
    trajectories, path = folder / "trajectories.parquet", folder / "teachers.parquet"
    assemble_trajectories.make(trajectories, [spans])
    teacher = Asked()
    references = References({"it": teacher}, reads=Reads(TWICE, chat))
    compute_references.make(path, trajectories, references, [shard], [spans])
    return teacher.sequences, [one.tolist() for one in arrays(read_table(path)["logprobs"])]


def test_later_turns_follow_the_teachers_prompt_as_they_were_recorded(
    tmp_path: Path, chat: Chat
) -> None:
    first = chat.render([QUESTION], [])
    said = [*chat.encode("I  am not"), *chat.stop_tokens[:1]]
    second = chat.extend(first, said, [AGAIN], [])
    assert second is not None
    shown = {"messages": [QUESTION], "tools": []}
    answer: Message = {"role": "assistant", "content": "I am not"}
    grown = {"messages": [QUESTION, answer, AGAIN], "tools": [], "kept_call": 0}
    calls = [
        call(0, first, said, **shown),
        call(1, second, said, **grown, kept_how="messages"),
        call(2, second, said[:2], **grown, kept_how="messages"),
    ]
    sequences, scores = asked_of(tmp_path, chat, calls)
    prompt = chat.render([TWICE_TOLD, QUESTION], [])
    assert sequences == [
        [*prompt, *second[len(first) :], *said],
        [*prompt, *second[len(first) :], *said[:2]],
    ], "a branch has the tokens of the call it grew from, and not its words anew"
    more = len(prompt) - len(first)
    own = [place + more for place in range(len(first), len(first) + len(said))]
    assert scores[0][len(first) : len(first) + len(said)] == own
    assert set(scores[0][: len(first)]) == {0}


def test_the_teacher_reads_tools_and_instructions_as_the_policy_did(
    tmp_path: Path, chat: Chat
) -> None:
    asked: Message = {"role": "system", "content": "Answer with nothing but a JSON object."}
    system: Message = {"role": "system", "content": "Be brief."}
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {}}}
    shown = {"messages": [system, QUESTION], "tools": [tool]}
    shown["attributes"] = {"instructions": asked["content"]}  # pyright: ignore[reportArgumentType]
    prompt = chat.render([system, QUESTION, asked], [tool])
    [sequence], _ = asked_of(tmp_path, chat, [call(0, prompt, [7, 8], **shown)])
    merged: Message = {"role": "system", "content": f"{TWICE_TOLD['content']}\n\nBe brief."}
    assert sequence == [*chat.render([merged, QUESTION, asked], [tool]), 7, 8]


def test_a_prompt_that_the_renderer_writes_otherwise_is_refused(tmp_path: Path, chat: Chat) -> None:
    spoken = call(0, [1, 2], [3], messages=[QUESTION], tools=[])
    with pytest.raises(UserError, match="writes a recorded prompt otherwise"):
        asked_of(tmp_path, chat, [spoken])


def test_a_renderer_without_system_messages_is_refused(tmp_path: Path, chat: Chat) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(find("local/tiny-chat").folder)
    plain = Chat(tokenizer, f"jinja:{template}")
    spoken = call(0, plain.render([QUESTION], []), [3], messages=[QUESTION], tools=[])
    with pytest.raises(UserError, match="takes no system message"):
        asked_of(tmp_path, plain, [spoken])


def test_a_text_becomes_the_beginning_of_a_system_message() -> None:
    system: Message = {"role": "system", "content": "Be brief."}
    assert read_before("Read.", [QUESTION]) == [{"role": "system", "content": "Read."}, QUESTION]
    assert read_before("Read.", [system, QUESTION])[0]["content"] == "Read.\n\nBe brief."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Your name is $name.", "an example has no name, which its teacher reads"),
        ("It costs $5.", r"a \$ that no column follows"),
        (" ", "reads is blank"),
    ],
)
def test_a_text_that_no_example_fills_is_refused(
    text: str, said: str, prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    with pytest.raises((UserError, ValueError), match=said):
        train(told(text), run="refused")
    assert not folder_of("refused").path.exists()


def test_a_text_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="reads does nothing without models"):
        Teacher(reads="You are a duck.")
