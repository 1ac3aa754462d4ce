"""The door's generateContent, asked by requests as Google's clients write them."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from ratchet.adapters.calls import Choice, Format, Message, Thinking
from ratchet.adapters.dialects.google_generate import GENERATION, GenerateContent
from ratchet.tasks.recording.spans import call_span
from tests.support.door.opened_door import CALL, CHAT, Opened

HELLO: Any = {"role": "user", "parts": [{"text": "hello"}]}
LOOK = {"name": "look", "parameters": {"type": "OBJECT", "properties": {"at": {"type": "STRING"}}}}
TOOL: Any = {"functionDeclarations": [LOOK]}
SEARCH: Any = {"googleSearch": {}}


def ask(opened: Opened, verb: str = "generateContent", key: str = "", **fields: Any) -> Any:
    response = httpx.post(
        f"{opened.url}/v1beta/models/gemini-9:{verb}",
        json={"contents": [HELLO], **fields},
        headers={"x-goog-api-key": key or opened.key},
        timeout=None,
    )
    if not verb.startswith("stream"):
        return response.json()
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def said(answer: Any) -> Any:
    """Return the parts of an answer."""
    (candidate,) = answer["candidates"]
    return candidate["content"]["parts"]


def read(**fields: Any) -> Any:
    return GenerateContent("m").read({"contents": [HELLO], **fields})


def test_an_answer_has_its_end_and_its_usage(opened: Opened) -> None:
    opened.say("Hé!<|im_end|>")
    answer = ask(opened, systemInstruction={"parts": [{"text": "Be short."}]})
    (span,) = opened.spans
    assert said(answer) == [{"text": "Hé!"}]
    assert answer["candidates"][0]["finishReason"] == "STOP"
    assert (answer["modelVersion"], answer["responseId"]) == ("gemini-9", span.response_id)
    usage = answer["usageMetadata"]
    assert usage["promptTokenCount"] == len(span.prompt_token_ids)
    assert usage["candidatesTokenCount"] == len(span.response_token_ids)
    system: Message = {"role": "system", "content": "Be short."}
    asked: Message = {"role": "user", "content": "hello"}
    assert list(span.prompt_token_ids) == CHAT.render([system, asked], [])
    counted = ask(opened, "countTokens", systemInstruction={"parts": [{"text": "Be short."}]})
    assert counted == {"totalTokens": len(span.prompt_token_ids)}
    opened.say("one")
    cut = ask(opened, generationConfig={"maxOutputTokens": 1})
    assert cut["candidates"][0]["finishReason"] == "MAX_TOKENS"


@pytest.mark.parametrize("verb", ["generateContent", "streamGenerateContent?alt=sse"])
def test_a_conversation_with_tools_keeps_the_tokens_of_its_turns(opened: Opened, verb: str) -> None:
    contents = [HELLO]
    for turn in range(4):
        opened.say("It is a cat.<|im_end|>" if turn % 2 else f"Let me see.{CALL}")
        answer = ask(opened, verb, contents=contents, tools=[TOOL, SEARCH])
        pieces = answer if isinstance(answer, list) else [answer]
        parts = [part for piece in pieces for part in said(piece)]
        contents += [{"role": "model", "parts": [part]} for part in parts]  # as a client keeps them
        if turn % 2:
            contents.append(HELLO)
            continue
        call = parts[-1]["functionCall"]
        assert (call["name"], call["args"]) == ("look", {"at": "x"})
        result = {"id": call["id"], "name": "look", "response": {"output": "a cat"}}
        contents.append({"role": "user", "parts": [{"functionResponse": result}]})
    assert [span.kept_how for span in opened.spans] == ["new", *["messages"] * 3]
    for earlier, later in pairwise(opened.spans):
        whole = [*earlier.prompt_token_ids, *earlier.response_token_ids]
        assert later.prompt_token_ids[: len(whole)] == whole
    assert call_span(opened.spans[0])["attributes"]["left_out_tools"] == ["googleSearch"]


def test_a_stream_holds_the_same_answer_token_by_token(opened: Opened) -> None:
    opened.say(f"<think>hm</think>Let me see.{CALL}")
    pieces = ask(opened, "streamGenerateContent?alt=sse", tools=[TOOL])
    parts = [part for piece in pieces for part in said(piece)]
    assert [part["text"] for part in parts if part.get("thought")] == CHAT.pieces("hm")
    texts = [part["text"] for part in parts if "text" in part and "thought" not in part]
    assert texts == CHAT.pieces("Let me see.")
    assert parts[-1]["functionCall"]["args"] == {"at": "x"}
    ends = ["finishReason" in piece["candidates"][0] for piece in pieces]
    assert (ends.count(True), ends[-1]) == (1, True)
    tokens = pieces[-1]["usageMetadata"]["candidatesTokenCount"]
    assert tokens == len(opened.spans[0].response_token_ids)


def test_a_stream_that_is_no_stream_of_events_is_refused(opened: Opened) -> None:
    response = httpx.post(
        f"{opened.url}/v1beta/models/m:streamGenerateContent",
        json={"contents": [HELLO]},
        headers={"x-goog-api-key": opened.key},
    )
    error = response.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["message"].startswith("alt is not sse")


def test_a_wrong_key_is_refused_in_google_s_form(opened: Opened) -> None:
    error = ask(opened, key="wrong")["error"]
    assert (error["code"], error["status"]) == (401, "UNAUTHENTICATED")


def test_settings_of_google_are_those_of_other_dialects() -> None:
    schema = {"type": "OBJECT", "properties": {"yes": {"type": "BOOLEAN"}}}
    config = {
        "temperature": 0.5,
        "topK": 64.0,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": schema,
        "thinkingConfig": {"thinkingBudget": 0, "includeThoughts": True},
    }
    chosen = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}
    settings = [{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}]
    request = read(
        generationConfig=config, tools=[TOOL], toolConfig=chosen, safetySettings=settings
    )
    assert request.model == "m"
    lower = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
    assert (request.format, request.stop) == (Format(lower), ["x"])
    assert request.choice == Choice("required", ("look",))
    assert (request.thinking, request.hints) == (Thinking(on=False), [])
    hinted = {"thinkingConfig": {"thinkingBudget": 512, "thinkingLevel": "HIGH"}}
    below = f"{GENERATION}.thinkingConfig"
    assert read(generationConfig=hinted).hints == [
        f"{below}.thinkingBudget",
        f"{below}.thinkingLevel",
    ]
    assert (request.fields["temperature"], request.fields["top_k"]) == (0.5, 64)
    assert request.tools[0]["function"]["parameters"]["type"] == "object"
    own = {**LOOK, "parametersJsonSchema": {"type": "object"}}
    (tool,) = read(tools=[{"functionDeclarations": [own]}]).tools
    assert tool["function"]["parameters"] == {"type": "object"}
