"""OpenAI's chat completions: bodies read as requests, completions written as answers or chunks."""

from collections.abc import Collection, Iterator, Sequence

from ratchet.adapters.calls import Completion, JsonObject, Message, Refused, Request
from ratchet.adapters.dialects.field_rules import Api, check_fields, find_hints
from ratchet.adapters.dialects.fields import (
    DONE,
    RETURN_TOKEN_IDS,
    Fields,
    bad_field,
    bad_request,
    check_body,
    read_thinking,
    write_data,
    write_prompt_token_ids,
    write_response_token_ids,
)
from ratchet.adapters.dialects.openai_fields import (
    check_sampling,
    read_choice,
    read_effort,
    read_format,
    write_error,
    write_logprobs,
)
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.messages import read_message, read_tool

__all__ = [
    "answer",
    "model",
    "models",
    "read",
    "stream",
    "wait",
    "write_error",
    "write_late_error",
]

MOST_ANSWERS = 8
EFFORT = "reasoning_effort"
CONTINUE = "continue_final_message"


def read(body: object, passed: Collection[str] = ()) -> Request:
    """Read a body; `passed` are fields that the model takes although no policy does."""
    sent, model = check_body(body)
    _check_fields(sent)
    tools = [read_tool(tool, path) for tool, path in sent.read_list("tools")]
    request = Request(
        model=model,
        messages=_read_messages(sent),
        tools=tools,
        max_tokens=sent.read_count("max_completion_tokens", "max_tokens"),
        stop=sent.read_stops("stop"),
        fields=sent.without("messages", "tools", "model"),
        format=read_format(sent.get("response_format"), "response_format"),
        choice=read_choice(sent, tools),
        answers=_count_answers(sent),
        thinking=read_thinking(sent) or (None if EFFORT in passed else read_effort(sent, EFFORT)),
        continues=_continues(sent),
        hints=find_hints(sent, Api.CHAT, passed),
        dialect="chat completions",
    )
    check_fields(sent, Api.CHAT, passed)
    return request


def answer(completion: Completion, chat: Chat, *others: Completion) -> JsonObject:
    """Write the answer, whose first completion has `others` beside it if `n` is above 1."""
    completions = (completion, *others)
    return {
        **_envelope(completion, "chat.completion"),
        "choices": [_choice(index, one, chat) for index, one in enumerate(completions)],
        "usage": _usage(completions),
        **write_prompt_token_ids(completion),
    }


def stream(
    completion: Completion, chat: Chat, *others: Completion, waited: int = 0
) -> Iterator[str]:
    del waited  # a comment has no number
    yield from map(write_data, _chunks(completion, chat, *others))
    yield DONE


def _chunks(completion: Completion, chat: Chat, *others: Completion) -> Iterator[JsonObject]:
    """Yield the answer in pieces: role, content, tool calls, the finish with its tokens, usage.

    The first piece of each choice has the token ids of the prompt.
    """
    envelope = _envelope(completion, "chat.completion.chunk")
    wants_usage = Fields(completion.request.fields.get("stream_options")).get("include_usage")
    if wants_usage:
        envelope["usage"] = None
    for index, one in enumerate((completion, *others)):
        empty = {"index": index, "delta": {}, "finish_reason": None, "logprobs": None}
        first, *further = (empty | {"delta": delta} for delta in _deltas(one.message, chat))
        yield {**envelope, "choices": [first], **write_prompt_token_ids(one)}
        for choice in (*further, empty | _ending(one, chat)):
            yield {**envelope, "choices": [choice]}
    if wants_usage:
        yield {**envelope, "choices": [], "usage": _usage((completion, *others))}


def wait(request: Request, name: str, told: int) -> str:
    """Write a comment, by which a client sees that the connection is alive."""
    del request, name, told
    return ": sampling\n\n"


def write_late_error(refused: Refused, request: Request, name: str, waited: int) -> str:
    del request, name, waited
    return write_data(write_error(refused))


def models(name: str) -> JsonObject:
    """Write the list of the only model in a form that OpenAI's and Anthropic's clients read."""
    ends = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [model(name)], **ends}


def model(name: str) -> JsonObject:
    """Write a model in a form that OpenAI's and Anthropic's clients read."""
    of_openai = {"id": name, "object": "model", "created": 0, "owned_by": "ratchet"}
    shown = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {**of_openai, **shown}


def _choice(index: int, completion: Completion, chat: Chat) -> JsonObject:
    """Write one answer, with null for an empty content, as OpenAI has it beside tool calls."""
    said = completion.message
    message = {"refusal": None, **said, "content": said["content"] or None}
    return {"index": index, "message": message, **_ending(completion, chat)}


def _ending(completion: Completion, chat: Chat) -> JsonObject:
    asked = completion.request.fields.get("logprobs")
    logprobs = {"content": write_logprobs(completion, chat), "refusal": None} if asked else None
    return {
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs,
        **write_response_token_ids(completion),
    }


def _deltas(message: Message, chat: Chat) -> Iterator[JsonObject]:
    """Yield a message token by token, as clients read it that run what is said."""
    yield {"role": "assistant", "content": ""}
    for key in ("reasoning_content", "content"):
        for piece in chat.pieces(message.get(key) or ""):
            yield {key: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        named = {**call["function"], "arguments": ""}
        yield {"tool_calls": [{"index": index, **call, "function": named}]}
        for piece in chat.pieces(str(call["function"]["arguments"])):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _envelope(completion: Completion, kind: str) -> JsonObject:
    return {
        "id": completion.response_id,
        "object": kind,
        "created": int(completion.ended.timestamp()),
        "model": completion.request.model,
        "system_fingerprint": completion.policy_version,
    }


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Count the prompt once, and the tokens of every answer."""
    prompt, _ = completions[0].token_counts
    sampled = sum(completion.token_counts[1] for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _check_fields(sent: Fields) -> None:
    check_sampling(sent)
    sent.read(RETURN_TOKEN_IDS, bool)
    sent.read("logprobs", bool)
    sent.read("stream_options", dict)


def _continues(sent: Fields) -> bool:
    """Read whether the answer goes on with the last message, which vLLM has in two fields."""
    continues, asks = (sent.read(name, bool) for name in (CONTINUE, "add_generation_prompt"))
    if continues and asks:
        raise bad_field(CONTINUE, "is true, and so is add_generation_prompt; give one of them.")
    if asks is False and not continues:
        raise bad_field("add_generation_prompt", f"is false; it needs {CONTINUE} to be true.")
    last, path = sent.read_list("messages")[-1]
    if continues and (Fields(last).get("role") != "assistant" or Fields(last).get("tool_calls")):
        problem = f"is true; then {path} must be the assistant's, without tool calls."
        raise bad_field(CONTINUE, problem)
    return bool(continues)


def _count_answers(sent: Fields) -> int:
    many = sent.read_count("n") or 1
    if many > MOST_ANSWERS:
        raise bad_field("n", f"is {many}; a call gets up to {MOST_ANSWERS} answers here.")
    return many


def _read_messages(sent: Fields) -> list[Message]:
    messages = sent.read_list("messages")
    if not messages:
        raise bad_request("There are no messages; send at least one.", "messages")
    return [read_message(one, path) for one, path in messages]
