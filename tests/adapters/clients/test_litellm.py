"""LiteLLM, both ways: our helpers through it, and programs that reach the policy through it."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ratchet.adapters.calls import POLICY, Policy, Refused
from ratchet.adapters.clients import litellm as clients
from ratchet.adapters.clients.current_rollout import Roles, rollout_context
from ratchet.adapters.clients.litellm import (
    SERVER_KEY,
    Reply,
    check_model,
    complete,
    import_litellm,
)
from ratchet.adapters.clients.litellm_provider import ask_role, provide
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.network import answers as bounds
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.door.opened_door import (
    ASK,
    CALL,
    CHAT,
    SAMPLING,
    TOKENS,
    TOOLS,
    Opened,
    Scripted,
)
from tests.support.door.played_batch import BATCH, PAIRS, service_without_engine, write_examples
from tests.support.servers.hostile_server import NO_END, SHAPES, dripping, hostile, saying

litellm = import_litellm()
UNAVAILABLE = ConnectionError("the sampler is away")
MCP = "litellm.responses.mcp.chat_completions_handler"


answers: list[Any] = []


async def asks_litellm(example: dict[str, Any], **_: str) -> float:
    """Ask without an address, as a program of LiteLLM's does."""
    messages = [{"role": "user", "content": example["name"]}]
    asked = {"model": "ratchet/policy", "messages": messages, "extra_body": TOKENS}
    answers.append(await litellm.acompletion(**asked))
    return 1.0


class Guess(BaseModel):
    noun: str


@pytest.fixture
def helper(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Put a door in the place of OpenAI, with its key in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", opened.key)
    monkeypatch.setenv("OPENAI_API_BASE", opened.url)
    return opened


def ask_helper(model: str = "openai/gpt-4o-mini", tools: Any = (), **fields: Any) -> Reply:
    return asyncio.run(complete(model, ASK, tools, fields))


def test_a_server_by_its_url_answers_and_has_no_price(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER_KEY, opened.key)
    opened.say("yes<|im_end|>")
    helped = ask_helper(f"{opened.url}#gpt-4o-mini", temperature=0.5)
    assert helped.message == {"role": "assistant", "content": "yes"}
    assert helped.usage.completion_tokens == 4
    assert helped.usage.cost is None
    (span,) = opened.spans
    assert (span.request.model, span.request.fields["temperature"]) == ("gpt-4o-mini", 0.5)


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "HOSTED_VLLM_API_KEY"])
def test_a_server_by_its_url_is_sent_no_key_of_another_one(
    variable: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER_KEY, raising=False)
    monkeypatch.setenv(variable, opened.key)
    with pytest.raises(Refused, match="refused its API key"):
        ask_helper(f"{opened.url}#some-model")


@pytest.mark.parametrize(
    "name", [*NO_END, "", "[]", "null", "{}", '{"choices": []}', "HTML", "its keys", "never"]
)
def test_a_server_by_its_url_gives_a_whole_answer_or_is_refused_in_time_and_shows_no_key(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clients, "LONGEST_SECONDS", 3.0)
    monkeypatch.setattr(bounds, "ANSWERING_SECONDS", 1.0)
    monkeypatch.setattr(bounds, "LARGEST_ANSWER", 2**23)
    monkeypatch.setenv(SERVER_KEY, "sk-0123456789abcdef0123456789")
    asked = {**NO_END, **SHAPES, "never": dripping}.get(name) or saying(name.encode())
    with hostile(saying(b"{}")) as other, hostile(asked) as server:
        server.elsewhere = f"{other.url}/x"
        with pytest.raises(Refused) as refused:
            ask_helper(f"{server.url}/v1#m")
        assert server.sent < 2**26
        assert other.asked == []
    assert "0123456789abcdef" not in f"{refused.value}{caplog.text}"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("http://127.0.0.1:9/v1#qwen", r"cannot be reached .*; start that server"),
        ("http://10.0.0.1:8000/v1#qwen", "over the network in clear"),
        ("http://127.0.0.1:9/v1", "write URL#MODEL"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_before_a_rollout(model: str, said: str) -> None:
    with pytest.raises(UserError, match=f"the role judge is answered by .*{said}"):
        check_model("judge", model)


def test_a_helper_of_unknown_price_has_no_cost(helper: Opened) -> None:
    assert ask_helper("openai/our-own").usage.cost is None


def test_a_helper_takes_tools_and_calls_them(helper: Opened) -> None:
    helper.say(CALL)
    helped = ask_helper(tools=TOOLS, tool_choice="auto")
    assert helped.finish_reason == "tool_calls"
    (call,) = helped.message.get("tool_calls", [])
    assert call["function"] == {"name": "look", "arguments": '{"at": "x"}'}
    assert list(helper.spans[0].request.tools) == TOOLS


def test_tools_reach_a_helper_whatever_mcp_is_installed(
    helper: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What LiteLLM above 1.102.4 meets beside the mcp 1.x that CrewAI needs.
    monkeypatch.setitem(sys.modules, MCP, None)
    helper.say(CALL)
    assert ask_helper(tools=TOOLS).finish_reason == "tool_calls"


def test_nothing_of_a_client_says_where_the_key_is_sent(helper: Opened) -> None:
    ask_helper(api_base="http://127.0.0.1:9/v1", base_url="http://127.0.0.1:9/v1", stream=True)
    assert "api_base" not in helper.spans[0].request.fields


@pytest.mark.parametrize(
    ("key", "model", "code"),
    [("sk-wrong", "openai/gpt-4o-mini", "helper_key"), (None, "nobody/knows-it", "helper")],
)
def test_a_helper_s_refusal_is_final_and_shows_no_key(
    helper: Opened, monkeypatch: pytest.MonkeyPatch, key: str | None, model: str, code: str
) -> None:
    key = key or helper.key
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(Refused) as refused:
        ask_helper(model)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert key not in refused.value.message


def test_a_helper_that_cannot_answer_now_may_be_asked_again(helper: Opened) -> None:
    helper.sampler.error = UNAVAILABLE
    with pytest.raises(Refused) as refused:
        ask_helper()
    assert refused.value.status == 503


def test_a_helper_s_first_failure_of_a_kind_is_logged_and_no_other(
    helper: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ratchet.adapters.clients.litellm._failed", set())
    helper.sampler.error = UNAVAILABLE
    for _ in range(3):
        with pytest.raises(Refused):
            ask_helper()
    (said,) = [
        record.message
        for record in caplog.records
        if record.name == "ratchet.adapters.clients.litellm"
    ]
    assert said.startswith("The helper openai/gpt-4o-mini could not answer")


@pytest.fixture
def inside(opened: Opened) -> Iterator[Opened]:
    """Play the rollout in this context."""
    provide([POLICY])
    with rollout_context(roles_of(opened)):
        yield opened


def roles_of(opened: Opened) -> Roles:
    return {POLICY: opened.batch.endpoints(opened.rollout)[POLICY]}


def complete_here(**fields: Any) -> Any:
    return litellm.completion(**{"model": "ratchet/policy", "messages": ASK, **fields})


def test_a_program_s_tokens_are_those_that_are_recorded(inside: Opened) -> None:
    answer = complete_here(logprobs=True, extra_body=TOKENS)
    (span,), (choice,) = inside.spans, answer.choices
    assert answer.prompt_token_ids == list(span.prompt_token_ids) == CHAT.render(ASK, [])
    assert choice.token_ids == list(span.response_token_ids)
    assert choice.provider_specific_fields["token_ids"] == choice.token_ids
    logprobs = [token.logprob for token in choice.logprobs.content]
    assert logprobs == pytest.approx(list(span.logprobs))
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert (answer.id, span.id.rollout_id) == (span.response_id, inside.rollout)


def test_what_a_program_sets_arrives_as_over_http(inside: Opened) -> None:
    inside.say("one two<|im_end|>")
    settings = {"temperature": 0.3, "top_p": 0.5, "top_k": 5, "seed": 3, "max_tokens": 100}
    answer = complete_here(**settings, stop=["two"], extra_body={"priority": 1})
    assert answer.choices[0].message.content == "one "
    (span,) = inside.spans
    assert span.request.fields == {**settings, "stop": ["two"], "priority": 1}
    assert (span.request.stop, span.request.max_tokens) == (["two"], 100)
    with pytest.raises(litellm.BadRequestError, match="min_p is not honoured here"):
        complete_here(extra_body={"min_p": 0.1})


def test_a_program_asks_asynchronously(inside: Opened) -> None:
    async def both() -> list[Any]:
        ask = partial(litellm.acompletion, model="ratchet/policy", messages=ASK)
        return await asyncio.gather(ask(), ask())

    answers = asyncio.run(both())
    assert {answer.id for answer in answers} == {span.response_id for span in inside.spans}
    assert len(inside.spans) == 2, "two opinions, not one that is given twice"


def test_a_program_calls_tools_and_its_history_extends(inside: Opened) -> None:
    inside.say(CALL)
    message = complete_here(tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "a cat"}
    inside.say("A cat.<|im_end|>")
    complete_here(tools=TOOLS, messages=[*ASK, message, result])
    first, second = inside.spans
    assert second.kept_tokens == len(first.prompt_token_ids) + len(first.response_token_ids)


def test_a_program_gets_as_many_answers_as_it_asks_for(inside: Opened) -> None:
    choices = complete_here(n=2, extra_body=TOKENS).choices
    sampled = [list(span.response_token_ids) for span in inside.spans]
    assert sorted(choice.token_ids for choice in choices) == sorted(sampled)
    (chunk, *_) = complete_here(n=2, stream=True)
    assert [choice.index for choice in chunk.choices] == [0, 1]


def test_a_response_format_arrives_as_its_schema(inside: Opened) -> None:
    inside.say('{"noun": "cat"}<|im_end|>')
    content = complete_here(response_format=Guess).choices[0].message.content
    assert Guess.model_validate_json(content) == Guess(noun="cat")
    sent: Any = inside.spans[0].request.fields["response_format"]
    assert sent["json_schema"]["schema"]["required"] == ["noun"]


def test_a_stream_brings_the_text_the_tokens_and_the_usage(inside: Opened) -> None:
    async def streamed() -> list[Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        asked = {"model": "ratchet/policy", "messages": ASK, "extra_body": TOKENS}
        stream = await litellm.acompletion(**asked, **options)
        return [chunk async for chunk in stream]

    inside.say("A cat.<|im_end|>")
    chunks = asyncio.run(streamed())
    (span,) = inside.spans
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == "A cat."
    assert choices[0].token_ids == list(span.response_token_ids)
    assert chunks[0].prompt_token_ids == list(span.prompt_token_ids)
    assert len(choices[0].logprobs.content) == len(span.logprobs)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == len(span.response_token_ids)


def test_a_stream_brings_tool_calls(inside: Opened) -> None:
    inside.say(CALL)
    chunks = list(complete_here(tools=TOOLS, stream=True))
    call, *_ = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "look")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_programs_believe_in_tools_and_schemas(inside: Opened) -> None:
    assert litellm.supports_function_calling("ratchet/policy")
    assert litellm.supports_response_schema("ratchet/policy")


def test_refusals_are_liteLLM_s_own_errors(inside: Opened) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature is 5"):
        complete_here(temperature=5)
    with pytest.raises(litellm.NotFoundError, match="role 'judge'; there is: policy"):
        complete_here(model="ratchet/judge")
    inside.sampler.error = UNAVAILABLE
    with pytest.raises(litellm.ServiceUnavailableError, match="try again"):
        complete_here()
    inside.end()
    with pytest.raises(litellm.BadRequestError, match="is over"):
        complete_here()
    assert inside.spans == []


def test_a_thread_knows_its_rollout_only_by_its_context(inside: Opened) -> None:
    body = {"model": "policy", "messages": ASK}
    assert asyncio.run(asyncio.to_thread(ask_role, "policy", body))["id"]
    raised: list[Exception] = []

    def ask() -> None:
        try:
            ask_role("policy", body)
        except Refused as refused:
            raised.append(refused)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "No rollout is being played here" in str(raised[0])


def test_outside_a_rollout_a_program_is_told_so() -> None:
    with pytest.raises(litellm.NotFoundError, match="No rollout is being played here"):
        complete_here()


def test_the_journal_has_the_tokens_that_an_agent_of_litellm_got(tmp_path: Path) -> None:
    run, sampler = RunFolder(tmp_path), Scripted()
    shard = write_examples(run, [{"name": name} for name in "ab"])
    policy: Any = Policy(sampler, "v0")
    settings = PlaySettings(f"{__name__}:{asks_litellm.__name__}", [POLICY], 4, 60.0)
    with Door(CHAT, {}, run_seed=0) as door:
        server = RolloutHost(run, door, service_without_engine(), settings)
        sampled_by = SampledBy({POLICY: policy}, SAMPLING)
        collect_rollouts.make(
            run.spans(BATCH), shard, PAIRS, server, lambda: sampled_by, play_batch
        )
    spans = read_journal(run.journal(BATCH))
    calls = {span["gen_ai_response_id"]: span for span in spans if span["kind"] == "llm"}
    assert len(calls) == len(answers) == 4
    for answer in answers:
        span = calls[answer.id]
        assert answer.prompt_token_ids == span["prompt_token_ids"].tolist()
        assert answer.choices[0].token_ids == span["response_token_ids"].tolist()
    assert [span["reward"] for span in spans if span["kind"] == "reward"] == [1.0] * 4
