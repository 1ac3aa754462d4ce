"""What a call says of its own answer: to think or not, and to go on with a message."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.adapters.calls import Request
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.role_calls import KeptCalls, request_sha
from ratchet.adapters.rendering.chat import Chat
from tests.support.door.door_batches import bearer
from tests.support.door.opened_door import ASK, CHAT, SAMPLING, Opened, opened_batch
from tests.support.every_renderer import NAMES, chat_of, tokenizer_of

OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
ON = "<|im_start|>assistant\n"
BEGUN: Any = {"role": "assistant", "content": "I am a"}
GO_ON = {"continue_final_message": True, "add_generation_prompt": False}


def prompt(opened: Opened) -> str:
    return CHAT.text(opened.spans[-1].prompt_token_ids)


def ask(opened: Opened, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "m", "input" if path == "responses" else "messages": ASK, **fields}
    said = httpx.post(f"{opened.url}/{path}", json=body, headers=bearer(opened.key), timeout=None)
    assert said.status_code == 200, said.text


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [
        ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ("chat/completions", {"chat_template_kwargs": {"thinking": False}}, OFF),
        ("chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}, ON),
        ("chat/completions", {"chat_template_kwargs": {}}, ON),
        ("chat/completions", {"reasoning_effort": "none"}, OFF),
        ("responses", {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}, OFF),
        ("responses", {"reasoning": {"summary": "auto"}}, ON),
        ("messages", {"thinking": {"type": "disabled"}}, OFF),
        ("messages", {"thinking": {"type": "adaptive"}}, ON),
    ],
)
def test_a_call_may_turn_thinking_off(
    opened: Opened, path: str, fields: dict[str, Any], end: str
) -> None:
    ask(opened, path, fields)
    assert prompt(opened).endswith(f"<|im_end|>\n{end}")


def test_tokens_are_counted_as_the_call_would_be_rendered(opened: Opened) -> None:
    counts = [
        httpx.post(
            f"{opened.url}/messages/count_tokens",
            json={"model": "m", "messages": ASK, "thinking": {"type": kind}},
            headers=bearer(opened.key),
            timeout=None,
        ).json()["input_tokens"]
        for kind in ("enabled", "disabled")
    ]
    assert counts[1] - counts[0] == len(CHAT.encode("<think>\n\n</think>\n\n"))


def test_a_format_without_a_switch_refuses_one_by_its_name() -> None:
    chat = Chat(tokenizer_of("llama-3"), "llama-3", 400)
    refused = pytest.raises(openai.BadRequestError, match="llama-3 cannot turn thinking off")
    with Door(chat, {}, run_seed=7) as door, opened_batch(door) as opened, refused:
        opened.ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("chat/completions", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("responses", {"reasoning": {"effort": "none"}}, "reasoning.effort"),
        ("messages", {"thinking": {"type": "disabled"}}, "thinking.type"),
    ],
)
def test_a_format_without_a_switch_answers_a_hint_and_the_record_names_it(
    path: str, fields: dict[str, Any], name: str
) -> None:
    chat = Chat(tokenizer_of("llama-3"), "llama-3", 400)
    with Door(chat, {}, run_seed=7) as door, opened_batch(door) as opened:
        ask(opened, path, fields)
        assert opened.spans[0].outcomes == {"left_out_fields": [name]}


def test_a_hint_that_no_policy_has_a_setting_for_is_left_out_and_the_record_names_it(
    opened: Opened,
) -> None:
    of_openai = opened.client
    of_anthropic = anthropic.Anthropic(
        base_url=opened.url, auth_token=opened.key, api_key=None, max_retries=0
    )
    sent: Any = {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}}
    hinted: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    further: Any = {"output_config": {"effort": "high"}}
    of_openai.responses.create(model="m", input="hello", **sent)
    of_openai.chat.completions.create(
        model="m", messages=ASK, reasoning_effort="high", verbosity="low"
    )
    of_anthropic.messages.create(model="m", messages=ASK, max_tokens=2048, **hinted, **further)
    of_openai.chat.completions.create(model="m", messages=ASK)
    assert [span.outcomes.get("left_out_fields") for span in opened.spans] == [
        ["reasoning.effort", "text.verbosity"],
        ["reasoning_effort", "verbosity"],
        ["thinking.budget_tokens", "output_config.effort"],
        None,
    ]
    assert len({tuple(span.prompt_token_ids) for span in opened.spans}) == 1


def test_a_hint_that_was_obeyed_is_not_left_out(opened: Opened) -> None:
    ask(opened, "chat/completions", {"reasoning_effort": "none"})
    assert opened.spans[0].outcomes == {}


def test_a_conversation_keeps_its_tokens_when_thinking_is_turned_off_and_on(opened: Opened) -> None:
    messages = [*ASK]
    for thinks in (True, False, True):
        fields = {"chat_template_kwargs": {"enable_thinking": thinks}}
        answer = opened.ask(messages=messages, extra_body=fields).choices[0].message
        messages += [{"role": "assistant", "content": answer.content}, *ASK]
    assert [span.kept_how for span in opened.spans] == ["new", "messages", "messages"]


def test_an_answer_goes_on_with_the_last_message(opened: Opened) -> None:
    opened.say(" fox.<|im_end|>")
    messages = [*ASK, BEGUN]
    answer = opened.ask(messages=messages, extra_body=GO_ON).choices[0].message
    assert answer.content == " fox."
    assert prompt(opened).endswith("<|im_start|>assistant\nI am a")
    merged = {"role": "assistant", "content": "I am a fox."}
    opened.ask(messages=[*ASK, merged, *ASK])
    first, second = opened.spans
    assert second.kept_how == "messages"
    assert second.kept_tokens == len([*first.prompt_token_ids, *first.response_token_ids])


def test_an_answer_that_was_cut_goes_on_with_its_own_tokens(opened: Opened) -> None:
    opened.say(" fox and")
    cut = opened.ask().choices[0].message.content
    messages = [*ASK, {"role": "assistant", "content": cut}]
    opened.ask(messages=messages, extra_body=GO_ON)
    first, second = opened.spans
    whole = [*first.prompt_token_ids, *first.response_token_ids]
    assert second.prompt_token_ids == whole
    assert (second.kept_how, second.kept_tokens) == ("messages", len(whole))


def test_a_message_that_ends_is_gone_on_with_by_its_text(opened: Opened) -> None:
    ended = opened.ask().choices[0].message.content
    opened.ask(messages=[*ASK, {"role": "assistant", "content": ended}], extra_body=GO_ON)
    assert prompt(opened).endswith(f"<|im_start|>assistant\n{ended.strip()}")


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_recorded_answer_is_recalled_only_for_the_same_settings(
    opened: Opened, fields: dict[str, Any]
) -> None:
    opened.ask(**fields)
    for again in (fields, {}):
        client = opened.begin_again(opened.spans[:1])
        client.chat.completions.create(model="m", messages=ASK, **again)
    first, second, third = opened.spans
    assert [span.recalled for span in opened.spans] == [False, True, False]
    assert first.outcomes == second.outcomes
    assert request_sha(third.request, SAMPLING) != request_sha(first.request, SAMPLING)


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_ends_with_the_text_that_is_gone_on_with_in_every_format(name: str) -> None:
    chat = chat_of(name)
    asked = Request("m", [*ASK, BEGUN], [], None, [], {}, continues=True)
    text = chat.text(KeptCalls(chat).prompt_of(asked).token_ids)
    assert text.startswith(chat.text(chat.render(ASK, [])))
    assert text.endswith("I am a")
