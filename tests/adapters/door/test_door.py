"""OpenAI's own clients, against the door."""

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import tinker

from ratchet.adapters.calls import Completion
from ratchet.adapters.door import role_calls
from ratchet.adapters.door.batches import MOST_REFUSALS, DueRollout
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.role_calls import CallSequence
from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.player_protocol import ROLE
from ratchet.adapters.process.event_loop import cancel_and_wait
from tests.support.door.door_batches import ListRecorder, bearer
from tests.support.door.opened_door import ASK, CALL, CHAT, TOKENS, TOOLS, Opened, opened_batch


def refusal(opened: Opened, **fields: Any) -> tuple[int, str | None]:
    with pytest.raises(openai.APIStatusError) as error:
        opened.ask(**fields)
    return error.value.status_code, error.value.code


def test_an_answer_has_usage_logprobs_and_token_ids(opened: Opened) -> None:
    opened.say("Hé!<|im_end|>")
    answer = opened.ask(logprobs=True, extra_body=TOKENS)
    (span,), (choice,) = opened.spans, answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hé!", "stop")
    assert choice.message.role == "assistant"
    assert choice.token_ids == list(span.response_token_ids)
    assert answer.prompt_token_ids == list(span.prompt_token_ids) == CHAT.render(ASK, [])
    assert answer.usage.prompt_tokens == len(span.prompt_token_ids)
    assert answer.usage.completion_tokens == len(span.response_token_ids) == len(span.logprobs)
    content = choice.logprobs.content
    assert [entry.logprob for entry in content[:3]] == [-0.125, -0.25, -0.375]
    assert b"".join(bytes(entry.bytes) for entry in content) == "Hé!<|im_end|>".encode()
    assert all(entry.top_logprobs == [] for entry in content)
    assert answer.id == span.response_id


def test_logprobs_and_token_ids_are_given_only_if_asked_for(opened: Opened) -> None:
    bodies = [
        ("chat/completions", {"messages": ASK}),
        ("responses", {"input": ASK}),
        ("messages", {"messages": ASK, "max_tokens": 9}),
    ]
    for path, fields in bodies:
        for told in ({}, TOKENS):
            for stream in (False, True):
                body = {"model": "m", "stream": stream, **fields, **told}
                url = f"{opened.url}/{path}"
                said = httpx.post(url, json=body, headers=bearer(opened.key), timeout=None)
                refused = bool(told) and stream and path == "messages"
                assert said.is_success is not refused
                asked = bool(told) and not refused
                assert ("prompt_token_ids" in said.text) is asked, (path, told, stream)
    assert opened.ask().choices[0].logprobs is None
    assert refusal(opened, extra_body={"return_token_ids": "yes"})[0] == 400


def test_the_async_client_asks_for_many_at_once(opened: Opened) -> None:
    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=opened.url, api_key=opened.key) as client:
            asked = [client.chat.completions.create(model="m", messages=ASK) for _ in range(16)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    answers = asyncio.run(ask_all())
    assert len(opened.spans) == 16
    assert len(set(answers)) > 8, "equal first tries are calls of their own, with their own seeds"
    assert sorted(span.id.number for span in opened.spans) == list(range(16))


def test_a_tool_call_alone_has_no_content(opened: Opened) -> None:
    opened.say(CALL)
    assert opened.ask(tools=TOOLS).choices[0].message.content is None


def test_a_stream_is_the_same_answer_token_by_token(opened: Opened) -> None:
    opened.say(f"Let me see.{CALL}")
    told: Any = {"stream_options": {"include_usage": True}, "logprobs": True, "extra_body": TOKENS}
    chunks = list(opened.ask(stream=True, tools=TOOLS, **told))
    (span,) = opened.spans
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [*filter(None, (delta.content for delta in deltas))] == CHAT.pieces("Let me see.")
    call, *written = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "look")
    assert [one.function.arguments for one in written] == CHAT.pieces('{"at": "x"}')
    last = chunks[-2].choices[0]
    assert (last.finish_reason, last.token_ids) == ("tool_calls", list(span.response_token_ids))
    assert len(last.logprobs.content) == len(span.logprobs)
    assert chunks[0].prompt_token_ids == list(span.prompt_token_ids)
    assert chunks[-1].usage.completion_tokens == len(span.response_token_ids)


def test_an_empty_answer_is_not_given_as_nothing(opened: Opened) -> None:
    opened.say("<|im_end|>")
    assert opened.ask().choices[0].message.content == " ?"
    assert CHAT.text(opened.spans[0].response_token_ids) == "<|im_end|>"
    messages = [*ASK, {"role": "assistant", "content": " ?"}, *ASK]
    opened.ask(messages=messages)
    assert opened.spans[1].kept_how == "messages"


def test_the_recipe_says_how_to_sample_and_the_client_is_recorded(opened: Opened) -> None:
    opened.ask(temperature=0.2, top_p=0.5, seed=1, max_tokens=3, user="me")
    (span,), (params,) = opened.spans, opened.sampler.asked
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, -1)
    assert (params.max_tokens, params.stop) == (3, CHAT.stop_tokens)
    assert params.seed == span.seed == span.id.seed(7) != 1
    assert span.request.fields == {
        "temperature": 0.2,
        "top_p": 0.5,
        "seed": 1,
        "max_tokens": 3,
        "user": "me",
    }
    opened.ask(max_tokens=10_000)
    assert opened.sampler.asked[1].max_tokens == 200


def test_a_client_s_stop_cuts_the_text_and_the_tokens_after_it(opened: Opened) -> None:
    opened.say("one two three<|im_end|>")
    choice = opened.ask(stop=["two", "three"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("one ", "stop")
    assert CHAT.text(opened.spans[0].response_token_ids) == "one two"
    assert len(opened.spans[0].logprobs) == len("one two")
    assert opened.sampler.asked[0].stop == ["two", "three", "<|im_end|>", "<|endoftext|>"]


def test_what_a_sampler_adds_after_the_end_is_cut(opened: Opened) -> None:
    opened.say("yes<|im_end|>no")
    choice = opened.ask(stop="never").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")
    assert CHAT.text(opened.spans[0].response_token_ids) == "yes<|im_end|>"


def test_an_answer_without_an_end_was_cut_by_length(opened: Opened) -> None:
    opened.say("one")
    assert opened.ask().choices[0].finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused(opened: Opened) -> None:
    opened.ask(messages=[{"role": "user", "content": "a cat " * 60}])
    room = 400 - len(opened.spans[0].prompt_token_ids)
    assert opened.sampler.asked[0].max_tokens == min(room, 200)
    long = [{"role": "user", "content": "a cat " * 400}]
    assert refusal(opened, messages=long) == (400, "context_length_exceeded")
    assert len(opened.spans) == 1


def test_refused_calls_are_recorded_with_their_reasons(opened: Opened) -> None:
    refusal(opened, messages=[{"role": "user", "content": "a cat " * 400}])
    refusal(opened, temperature=9)
    opened.post(b"no JSON")
    nobody = opened.at(opened.url.replace("/role/policy/", "/role/nobody/"))
    with pytest.raises(openai.NotFoundError):
        nobody.chat.completions.create(model="m", messages=ASK)
    told = [(one.role, one.number, one.status, one.code) for one in opened.refusals]
    assert told == [
        ("policy", 0, 400, "context_length_exceeded"),
        ("policy", 1, 400, "refused"),
        ("policy", 2, 400, opened.refusals[2].code),
        ("nobody", 0, 404, "no_role"),
    ]
    assert "maximum context length is 400 tokens, and the messages have" in (
        opened.refusals[0].message
    )
    assert "temperature is 9; it must be from 0 to 2" in opened.refusals[1].message
    assert opened.spans == []


def test_a_client_that_is_refused_without_end_is_recorded_so_far(opened: Opened) -> None:
    for _ in range(MOST_REFUSALS + 3):
        assert opened.post(b"no JSON").status_code == 400
    assert len(opened.refusals) == MOST_REFUSALS
    opened.end()
    assert opened.post(b"no JSON").status_code == 410
    assert len(opened.refusals) == MOST_REFUSALS


def test_models_are_listed_and_all_else_is_not_there(opened: Opened) -> None:
    assert [model.id for model in opened.client.models.list()] == ["policy"]
    for method, path in [("POST", "/completions"), ("GET", "/chat/completions"), ("GET", "/x")]:
        response = httpx.request(
            method, opened.url + path, headers=bearer(opened.key), timeout=None
        )
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{not json", "invalid_json"),
        (b'{"model": "m", "temperature": NaN}', "invalid_json"),
        (b'{"model": "m", "odd": 1e999}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"\xff\xfe\xfa", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": ' + b"[" * 300 + b"]" * 300 + b"}", "invalid_json"),
        (b" " * (16 * 1024 * 1024 + 1), "body_too_large"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(opened: Opened, content: bytes, code: str) -> None:
    response = opened.post(content)
    status = 413 if code == "body_too_large" else 400
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_each_of_n_answers_is_a_call_of_its_own(opened: Opened) -> None:
    answer = opened.ask(n=3, logprobs=True, extra_body=TOKENS)
    by_call = sorted(opened.spans, key=lambda span: span.id.number)
    assert [span.id.number for span in by_call] == [0, 1, 2]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, span in zip(answer.choices, by_call, strict=True):
        assert choice.token_ids == list(span.response_token_ids)
        assert span.seed == span.id.seed(7)
    assert len({tuple(span.response_token_ids) for span in by_call}) == 3
    assert answer.usage.prompt_tokens == len(by_call[0].prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(span.response_token_ids) for span in by_call)


def test_a_conversation_goes_on_from_whichever_of_n_answers_was_taken(opened: Opened) -> None:
    chosen = opened.ask(n=3).choices[1]
    messages = [*ASK, {"role": "assistant", "content": chosen.message.content}, *ASK]
    opened.ask(messages=messages)
    assert (opened.spans[-1].kept_how, opened.spans[-1].kept_call) == ("messages", 1)


def test_n_answers_are_streamed_one_after_the_other(opened: Opened) -> None:
    opened.say("yes<|im_end|>")
    chunks = list(opened.ask(n=2, stream=True))
    said = [
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i)
        for i in (0, 1)
    ]
    assert said == ["yes", "yes"]
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 2


def test_n_answers_that_were_lost_are_given_again(opened: Opened) -> None:
    body = json.dumps({"model": "m", "messages": ASK, "n": 2}).encode()
    first, second = (opened.post(body, **{"x-stainless-retry-count": str(i)}) for i in (0, 1))
    assert first.text == second.text
    assert len(opened.spans) == 2


def test_only_rollouts_that_are_being_played_are_answered(opened: Opened) -> None:
    another, later = "train-00009-0000-00", replace(opened.batch, attempt=opened.batch.attempt + 1)
    for batch, rollout, status in ((opened.batch, another, 410), (later, opened.rollout, 404)):
        client = opened.at(batch.url(ROLE, rollout)).with_options(api_key=batch.key(rollout))
        with pytest.raises(openai.APIStatusError, match="not being played") as error:
            client.chat.completions.create(model="m", messages=ASK)
        assert error.value.status_code == status
    judge = opened.at(opened.batch.url(ROLE, opened.rollout, "judge"))
    with pytest.raises(openai.NotFoundError, match="role 'judge'"):
        judge.chat.completions.create(model="m", messages=ASK)
    assert opened.end().status_code == 200
    assert refusal(opened) == (410, "over")
    assert opened.spans == []


def failed(category: str) -> Exception:
    kind = tinker.types.RequestErrorCategory(category)
    return tinker.RequestFailedError("the seed is odd", "r", kind)


def bad_request() -> Exception:
    response = httpx.Response(400, request=httpx.Request("POST", "http://x"))
    return tinker.BadRequestError("odd", response=response, body={"detail": "the seed is odd"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failed("user"), (400, "sampler_refused")),
        (bad_request(), (400, "sampler_refused")),
        (failed("server"), (503, "sampler_unavailable")),
        (tinker.APIConnectionError(request=httpx.Request("POST", "http://x")), (503, None)),
    ],
)
def test_a_sampler_s_failure_is_told_apart(
    opened: Opened, error: Exception, expected: tuple[int, str | None]
) -> None:
    opened.sampler.error = error
    status, code = refusal(opened)
    assert (status, code) == (expected[0], expected[1] or "sampler_unavailable")
    assert opened.spans == []


def test_the_cause_of_a_failure_nobody_foresaw_is_told_recorded_and_logged(
    opened: Opened, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "tml-of-nobody")
    opened.sampler.error = KeyError("no row of tml-of-nobody" + "\nis here" * 99)
    with pytest.raises(openai.InternalServerError) as error:
        opened.client.with_options(max_retries=2).chat.completions.create(model="m", messages=ASK)
    assert len(opened.sampler.asked) == 1, "it is in vain to ask again"
    (recorded,) = opened.refusals
    for told in (error.value.message, recorded.message):
        assert "The endpoint failed: KeyError: 'no row of ***" in told
        assert len(told) < 600
    assert (recorded.status, recorded.code) == (500, "internal_error")
    assert "Traceback" in caplog.text
    assert "in _sample" in caplog.text


def test_a_failure_that_passes_is_asked_again_with_the_same_seed(opened: Opened) -> None:
    opened.sampler.error = failed("server")

    async def recover() -> None:
        if len(opened.sampler.asked) == 2:
            opened.sampler.error = None

    opened.sampler.hold = recover
    opened.client.with_options(max_retries=2).chat.completions.create(model="m", messages=ASK)
    assert [params.seed for params in opened.sampler.asked] == [opened.spans[0].seed] * 2
    assert [span.id.number for span in opened.spans] == [0]


@pytest.fixture
def held_until_resent(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the first call's sampling until the door has met an equal request."""
    resent, is_resent = asyncio.Event(), role_calls._is_resent

    async def is_resent_and_tell(pending: role_calls.PendingRequest, meta: Any) -> bool:
        try:
            return await is_resent(pending, meta)
        finally:
            resent.set()

    monkeypatch.setattr(role_calls, "_is_resent", is_resent_and_tell)
    opened.sampler.hold = resent.wait


def test_a_lost_answer_is_given_again(opened: Opened) -> None:
    body = json.dumps({"model": "m", "messages": ASK}).encode()
    tries = [opened.post(body, **{"x-stainless-retry-count": str(count)}) for count in (0, 1, 2)]
    assert len({response.text for response in tries}) == 1
    assert len(opened.spans) == 1
    fresh = opened.post(body, **{"x-stainless-retry-count": "0"})
    assert fresh.json()["id"] != tries[0].json()["id"]


@pytest.mark.usefixtures("held_until_resent")
def test_equal_requests_under_way_are_one_where_nobody_counts_tries(opened: Opened) -> None:
    async def ask_twice() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=bearer(opened.key), timeout=None) as client:
            body = {"model": "m", "messages": ASK}
            asked = [client.post(f"{opened.url}/chat/completions", json=body) for _ in range(2)]
            return list(await asyncio.gather(*asked))

    first, second = asyncio.run(ask_twice())
    assert first.text == second.text
    assert len(opened.spans) == 1


def give_up(opened: Opened) -> None:
    """Have a client leave while its call is being sampled."""

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=opened.url, api_key=opened.key) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="any", messages=ASK))
            while not opened.sampler.asked and not asking.done():
                await asyncio.sleep(0.01)
            await cancel_and_wait(asking)

    asyncio.run(leave())


@pytest.mark.usefixtures("held_until_resent")
def test_a_client_that_gives_up_is_recorded_and_served_when_it_comes_back(opened: Opened) -> None:
    give_up(opened)
    answer = opened.ask()
    assert len(opened.spans) == 1
    assert answer.id == opened.spans[0].response_id


def test_an_end_waits_for_calls_under_way(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, finish = asyncio.Event(), CallSequence.finish

    async def finish_and_tell(calls: CallSequence) -> Any:
        ending.set()
        return await finish(calls)

    monkeypatch.setattr(CallSequence, "finish", finish_and_tell)
    opened.sampler.hold = ending.wait
    give_up(opened)
    assert opened.spans == []
    assert opened.end().status_code == 200
    assert len(opened.spans) == 1
    assert opened.ends[0].calls == {"policy": [0]}


def test_an_answer_that_cannot_be_recorded_is_withheld(open_door: Door) -> None:
    tries: list[Completion] = []

    class FullDisk(ListRecorder):
        async def answered(self, completion: Completion) -> None:
            tries.append(completion)
            raise OSError(28, "No space left on device")

    recorder = FullDisk([DueRollout("train-00000-0000-00", {})])
    with opened_batch(open_door, recorder) as opened:
        opened.say("secret<|im_end|>")
        client = opened.client.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError, match="No space left") as error:
            client.chat.completions.create(model="m", messages=ASK)
    assert "secret" not in error.value.response.text
    assert len(tries) == 1, "it is in vain to ask again"


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port} of 127.0.0.1") as one:
            Door(CHAT, {}, run_seed=7, listener=Listener(port=port))
    assert str(one.value).endswith("; stop what listens there, or give another port")


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(UserError, match="cannot listen on port 8600") as one:
        Door(CHAT, {}, run_seed=7, listener=Listener("203.0.113.1", 8600))
    assert str(one.value).endswith("; give this machine that address, or name one that it has")


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key", "x-goog-api-key"])
def test_a_key_is_read_where_each_client_sends_it(opened: Opened, header: str) -> None:
    listed = httpx.get(f"{opened.url}/models", headers={header: opened.key})
    assert listed.status_code == 200


ODD_HEADERS = (
    ("x-stainless-retry-count", "\u00b2"),
    ("x-stainless-retry-count", "9" * 5000),
    ("content-type", "text/plain; charset=utf-16"),
    ("authorization", "\u00e9"),
    ("x-api-key", "\xff"),
)


@pytest.mark.parametrize(("name", "value"), ODD_HEADERS)
def test_odd_headers_are_no_fault_of_the_door(opened: Opened, name: str, value: str) -> None:
    headers = {**bearer(opened.key), name: value}
    raw = [(key.encode(), text.encode("latin-1")) for key, text in headers.items()]
    body = {"model": "m", "messages": ASK}
    said = httpx.post(f"{opened.url}/chat/completions", json=body, headers=raw, timeout=None)
    assert said.status_code == (401 if name == "authorization" else 200)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_a_bearer_is_one_in_any_letters(opened: Opened, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {opened.key}"}
    assert httpx.get(f"{opened.url}/models", headers=headers).status_code == 200


def test_no_key_is_not_called_a_wrong_key(opened: Opened) -> None:
    for headers, said in (
        ({"my-key": opened.key}, "There is no API key; send it in one of the headers auth"),
        ({"api-key": "wrong"}, "The API key does not open this path"),
    ):
        refused = httpx.get(f"{opened.url}/models", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.json()["error"]["message"].startswith(said)


def test_a_model_is_found_by_its_name(opened: Opened) -> None:
    (listed,) = opened.client.models.list().data
    assert opened.client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here; there is: "):
        opened.client.models.retrieve("gpt")
