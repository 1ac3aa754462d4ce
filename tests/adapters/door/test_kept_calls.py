import asyncio
import json
import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.calls import (
    CallId,
    Completion,
    FunctionCall,
    Message,
    Policy,
    Refused,
    Request,
    Sampling,
    Tool,
    ToolCall,
)
from ratchet.adapters.door.policy_backend import PolicyBackend
from ratchet.adapters.door.role_calls import (
    SAMPLER_FORBIDDEN,
    CallSequence,
    KeptCalls,
    Memory,
    RequestMeta,
)
from ratchet.adapters.errors import UserError
from tests.support.door.answered_call import answered_call
from tests.support.door.door_batches import ListRecorder
from tests.support.door.garbage import no_collector
from tests.support.door.stand_in import CHAT, END, StandIn, letters, tool_call, turn

SAMPLING = Sampling(max_tokens=200, temperature=1.0, top_p=1.0, top_k=-1)
TOOLS: list[Tool] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
]
ASK: list[Message] = [{"role": "user", "content": "hello"}]
STYLES = ("verbatim", "stripped", "tool call")


def as_the_client_repeats_it(message: Message, style: str) -> list[Message]:
    """Return the answer in the client's style, and the message that follows it."""
    if style == "tool call":
        (call,) = message.get("tool_calls", [])
        function = call["function"]
        arguments = json.dumps(json.loads(str(function["arguments"])), sort_keys=True, indent=1)
        again: ToolCall = {
            "id": "mine",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        said: Message = {"role": "assistant", "content": "", "tool_calls": [again]}
        return [said, {"role": "tool", "content": "a cat", "tool_call_id": "mine"}]
    content = message["content"].strip() if style == "stripped" else message["content"]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]


async def conversation(seed: int, styles: list[str]) -> list[Completion]:
    said = iter(styles)

    def write(chosen: random.Random, *_: object) -> list[int]:
        if next(said) == "tool call":
            space = " " * chosen.randint(0, 3)
            return tool_call("look", f'{{"b":{space}[1, 2],"a":{space}"x"}}')
        return [*CHAT.encode("<think>" if chosen.random() < 0.2 else ""), *turn(chosen)]

    async def here() -> bool:
        return False

    policy = Policy(StandIn(write), "v0")  # pyright: ignore[reportArgumentType]
    answer = PolicyBackend(CHAT, policy, SAMPLING, run_seed=seed).answer
    recorder = ListRecorder([])
    calls = CallSequence(CallId("r", 0, "policy", 0), CHAT, recorder)
    messages: list[Message] = [*ASK]
    for number, style in enumerate(styles):
        request = Request("m", [*messages], TOOLS, 100, [], {})
        meta = RequestMeta(bytes([number]), 0, here, print)
        (completion,) = await calls.answer_all(request, meta, answer)
        messages += as_the_client_repeats_it(completion.message, style)
    return recorder.completions


def test_the_calls_of_an_attempt_leave_memory_without_the_garbage_collector() -> None:
    calls = CallSequence(CallId("r", 0, "policy", 0), CHAT, ListRecorder([]))
    kept = weakref.ref(calls)
    with no_collector():
        del calls
        assert kept() is None


def test_weights_that_cannot_be_made_again_are_no_fault_of_the_request() -> None:
    class Lost:
        async def sample(self, *_: object) -> Any:
            raise UserError("datums/00000.parquet is gone")

    policy = Policy(Lost(), "00001")  # pyright: ignore[reportArgumentType]
    answer, memory = PolicyBackend(CHAT, policy, SAMPLING, 0).answer, Memory(KeptCalls(CHAT), print)
    request = Request("m", ASK, [], 4, [], {})
    with pytest.raises(Refused, match=r"00000\.parquet is gone") as refused:
        asyncio.run(answer(request, CallId("r", 0, "policy", 0), memory))
    assert refused.value.code == SAMPLER_FORBIDDEN


@given(st.integers(0, 2**32), st.lists(st.sampled_from(STYLES), min_size=2, max_size=5))
def test_a_prompt_begins_with_all_earlier_tokens_whatever_was_sampled(
    seed: int, styles: list[str]
) -> None:
    completions = asyncio.run(conversation(seed, styles))
    assert len(completions) == len(styles)
    for earlier, later in pairwise(completions):
        said = [*earlier.prompt_token_ids, *earlier.response_token_ids]
        assert later.prompt_token_ids[: len(said)] == said
        assert later.kept_tokens == len(said)
        assert (later.kept_call, later.kept_how) == (earlier.id.number, "messages")


def known(said: list[int], reply: Message, tools: Any = ()) -> tuple[KeptCalls, list[int]]:
    """Return the kept calls after one answer to ASK, and the tokens of that call."""
    kept = KeptCalls(CHAT)
    prompt = kept.prompt(ASK, tools).token_ids
    kept.remember(answered_call(ASK, tools, reply, prompt, said))
    return kept, prompt + said


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def test_a_react_client_s_observation_continues_the_answer_s_tokens() -> None:
    thought = "I look.\nObservation:"
    kept, tokens = known(letters(thought), assistant("I look."))
    messages = [*ASK, assistant(f"{thought} a cat"), {"role": "user", "content": "go on"}]
    prompt = kept.prompt(messages, ())
    assert (prompt.how, prompt.kept_call, prompt.kept_tokens) == ("text", 0, len(tokens))
    assert prompt.token_ids[: len(tokens)] == tokens
    rest = " a cat<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.text(prompt.token_ids[len(tokens) :]) == rest


def test_an_answer_that_the_model_ended_is_not_continued() -> None:
    kept, _ = known([*letters("I look."), END], assistant("I look."))
    prompt = kept.prompt([*ASK, assistant("I look.\nObservation: a cat"), *ASK], ())
    assert (prompt.how, prompt.kept_tokens, prompt.kept_call) == ("ended", 0, None)


def test_an_earlier_answer_is_kept_if_the_last_one_was_ended_and_added_to() -> None:
    kept, tokens = known([*letters("Hi"), END], assistant("Hi"))
    second = [*ASK, assistant("Hi"), *ASK]
    prompt, said = kept.prompt(second, ()).token_ids, [*letters("I look."), END]
    kept.remember(answered_call(second, (), assistant("I look."), prompt, said, 1))
    third = kept.prompt([*second, assistant("I look.\nObservation: a cat"), *ASK], ())
    assert (third.how, third.kept_call, third.kept_tokens) == ("text", 0, len(tokens))


@pytest.mark.parametrize(
    ("messages", "tools", "how"),
    [
        ([{"role": "user", "content": "another"}], (), "new"),
        ([*ASK, assistant("I never said so"), *ASK], (), "unknown"),
        ([{"role": "user", "content": "changed"}, assistant("Hi"), *ASK], (), "unknown"),
        ([*ASK, assistant("Hi"), *ASK], TOOLS, "tools"),
    ],
)
def test_a_prompt_that_keeps_no_tokens_says_why(
    messages: list[Message], tools: Any, how: str
) -> None:
    kept, _ = known([*letters("Hi"), END], assistant("Hi"))
    prompt = kept.prompt(messages, tools)
    assert (prompt.how, prompt.kept_tokens, prompt.kept_call) == (how, 0, None)
    assert prompt.token_ids == CHAT.render(messages, tools)


def test_an_answer_keeps_its_tokens_when_a_later_one_was_edited() -> None:
    kept, tokens = known([*letters("Hi"), END], assistant("Hi"))
    prompt = kept.prompt([*ASK, assistant("Hi"), *ASK, assistant("edited"), *ASK], ())
    assert (prompt.how, prompt.kept_tokens) == ("text", len(tokens))
    assert CHAT.text(prompt.token_ids).count("<|im_end|>") == 5


def test_tool_arguments_match_by_value_and_ids_do_not_matter() -> None:
    def calling(arguments: str, name: str) -> Message:
        function: FunctionCall = {"name": "look", "arguments": arguments}
        call: ToolCall = {"id": name, "type": "function", "function": function}
        return {**assistant(""), "tool_calls": [call]}

    result: Message = {"role": "tool", "content": "a cat", "tool_call_id": "b"}
    kept, tokens = known([*letters("x"), END], calling('{"a":1,"b":2}', "a"), TOOLS)
    same = kept.prompt([*ASK, calling('{"b": 2, "a": 1}', "b"), result], TOOLS)
    assert same.kept_tokens == len(tokens)
    other = kept.prompt([*ASK, calling('{"b": 2, "a": 3}', "b"), result], TOOLS)
    assert other.how == "unknown"


def test_a_json_answer_matches_by_value() -> None:
    kept, tokens = known([*letters('{"number":  7}'), END], assistant('{"number":  7}'))
    assert kept.prompt([*ASK, assistant('{"number":7}'), *ASK], ()).kept_tokens == len(tokens)
    assert kept.prompt([*ASK, assistant('{"number": 8}'), *ASK], ()).how == "unknown"


@pytest.mark.parametrize("written", ["[" * 100_000, "[" + "1" * 5000 + "]", "{not JSON"])
def test_an_answer_that_only_begins_like_json_matches_as_text(written: str) -> None:
    kept, tokens = known([*letters("x"), END], assistant(written))
    assert kept.prompt([*ASK, assistant(f" {written}"), *ASK], ()).kept_tokens == len(tokens)
