"""OpenAI's chat completions: bodies read as requests, completions written as answers or chunks.

OpenAI's responses share fields with them: numbers, the tool choice, the answer's format.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from ratchet.adapters.calls import (
    Choice,
    Completion,
    Format,
    JsonObject,
    Message,
    Refused,
    Request,
    Tool,
)
from ratchet.adapters.dialects import fields
from ratchet.adapters.dialects.fields import Api, Fields
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.messages import read_message, read_tool

MOST_ANSWERS = 8
EFFORT = "reasoning_effort"
CONTINUE = "continue_final_message"
CHOICE_MODES = ("auto", "none", "required")
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def read(body: object, passed: Collection[str] = ()) -> Request:
    """Read a body; `passed` are fields that the model takes although no policy does."""
    sent, model = fields.check_body(body)
    check_sampling(sent)
    sent.read(fields.RETURN_TOKEN_IDS, bool)
    sent.read("logprobs", bool)
    sent.read("stream_options", dict)
    if (many := sent.read_count("n") or 1) > MOST_ANSWERS:
        raise fields.bad_field("n", f"is {many}; a call gets up to {MOST_ANSWERS} answers here.")
    tools = [read_tool(tool, path) for tool, path in sent.read_list("tools")]
    request = Request(
        model=model,
        messages=[read_message(one, path) for one, path in sent.read_some("messages")],
        tools=tools,
        max_tokens=sent.read_count("max_completion_tokens", "max_tokens"),
        stop=sent.read_stops("stop"),
        fields=sent.without("messages", "tools", "model"),
        format=read_format(sent.get("response_format"), "response_format"),
        choice=read_choice(sent, tools),
        answers=many,
        thinking=fields.read_thinking(sent)
        or fields.no_thinking(EFFORT not in passed and sent.read(EFFORT, str) == "none", EFFORT),
        continues=_continues(sent),
        hints=fields.find_hints(sent, Api.CHAT, passed),
        dialect="chat completions",
    )
    fields.check_fields(sent, Api.CHAT, passed)
    return request


def answer(completion: Completion, chat: Chat, *others: Completion) -> JsonObject:
    """Write the answer, whose first completion has `others` beside it if `n` is above 1."""
    completions = (completion, *others)
    return {
        **_envelope(completion, "chat.completion"),
        "choices": [_choice(index, one, chat) for index, one in enumerate(completions)],
        "usage": _usage(completions),
        **fields.write_prompt_token_ids(completion),
    }


def stream(completion: Completion, chat: Chat, *others: Completion, **_: object) -> Iterator[str]:
    yield from map(fields.write_data, _chunks(completion, chat, *others))
    yield fields.DONE


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
        yield {**envelope, "choices": [first], **fields.write_prompt_token_ids(one)}
        for choice in (*further, empty | _ending(one, chat)):
            yield {**envelope, "choices": [choice]}
    if wants_usage:
        yield {**envelope, "choices": [], "usage": _usage((completion, *others))}


def wait(*_: object) -> str:
    """Write a comment, by which a client sees that the connection is alive."""
    return ": sampling\n\n"


def write_late_error(refused: Refused, *_: object) -> str:
    return fields.write_data(write_error(refused))


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
        **fields.write_response_token_ids(completion),
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
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _continues(sent: Fields) -> bool:
    """Read whether the answer goes on with the last message, which vLLM has in two fields."""
    continues, asks = (sent.read(name, bool) for name in (CONTINUE, "add_generation_prompt"))
    if continues and asks:
        raise fields.bad_field(
            CONTINUE, "is true, and so is add_generation_prompt; give one of them."
        )
    if asks is False and not continues:
        raise fields.bad_field(
            "add_generation_prompt", f"is false; it needs {CONTINUE} to be true."
        )
    last, path = sent.read_list("messages")[-1]
    if continues and (Fields(last).get("role") != "assistant" or Fields(last).get("tool_calls")):
        problem = f"is true; then {path} must be the assistant's, without tool calls."
        raise fields.bad_field(CONTINUE, problem)
    return bool(continues)


def check_sampling(sent: Fields) -> None:
    """Refuse fields of a wrong type."""
    sent.check_ranges(NUMBERS)
    sent.check_top_k()
    sent.read("seed", int)
    sent.read("stream", bool)
    sent.read("parallel_tool_calls", bool)
    sent.read("top_logprobs", int)


def name_chosen(chosen: Fields) -> str:
    """Return the name of a function, which chat completions have in an object of its own."""
    kind, name = chosen.get("type", "function"), Fields(chosen.get("function", chosen)).get("name")
    if kind != "function":
        problem = f"is of type {kind!r}; only function and allowed_tools are known."
        raise fields.bad_field("tool_choice", problem)
    if not isinstance(name, str):
        raise fields.bad_field("tool_choice", "names no function; give its name.")
    return name


def read_choice(
    sent: Fields, tools: Sequence[Tool], name_chosen: Callable[[Fields], str] = name_chosen
) -> Choice:
    """Read the tool choice; it may name only `tools`, by the names that the model is shown."""
    chosen = sent.get("tool_choice")
    mode, names = "auto", ()
    if isinstance(chosen, dict):
        mode, names = _read_named_choice(Fields(chosen, "tool_choice"), name_chosen)
    elif isinstance(chosen, str) and chosen in CHOICE_MODES:
        mode = chosen
    elif chosen is not None:
        problem = f"is {chosen!r}; it is one of {', '.join(CHOICE_MODES)}, or names a function."
        raise fields.bad_field("tool_choice", problem)
    fields.check_offered(mode, names, tools)
    return Choice(mode, names, parallel=sent.get("parallel_tool_calls") is not False)


def read_format(value: object, path: str) -> Format | None:
    """Read the format of the answer; None means free text.

    Chat completions have the schema in an object of its own, responses have it beside the type.
    """
    named, sent = fields.type_of(value), Fields(value, path)
    if value is None or named == "text":
        return None
    if named == "json_object":
        return Format()
    if named != "json_schema":
        text = f"{path}.type is {named!r}; it is text, json_object or json_schema."
        raise fields.bad_request(text, path)
    written = sent.read_object("json_schema") if "json_schema" in sent else sent
    return Format(written.read("schema", dict), written.path_of("schema"))


def write_logprobs(completion: Completion, chat: Chat) -> list[JsonObject]:
    """Write a row for each token id, the end-of-turn token included, as vLLM does."""
    found: list[JsonObject] = []
    for token, logprob in zip(completion.response_token_ids, completion.logprobs, strict=True):
        text, data = chat.spelling(token)
        found.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return found


def write_error(refused: Refused) -> JsonObject:
    kinds = "invalid_request_error" if refused.status < 500 else "server_error"
    shown = {"message": refused.message, "type": kinds}
    return {"error": {**shown, "param": refused.param, "code": refused.code}}


def to_chat_fields(request: Request) -> JsonObject:
    """Return a request's attributes as fields of chat completions; None where one is not set."""
    return {
        "max_tokens": request.max_tokens,
        "max_completion_tokens": None,
        "stop": list(request.stop) or None,
        "tool_choice": _write_choice(request.choice),
        "parallel_tool_calls": None if request.choice.parallel else False,
        "response_format": request.fields.get("response_format") or _write_format(request.format),
    }


def _write_choice(choice: Choice) -> str | JsonObject | None:
    functions: list[JsonObject] = [
        {"type": "function", "function": {"name": name}} for name in choice.names
    ]
    if not functions:
        return None if choice.mode == "auto" else choice.mode
    if choice.mode == "required" and len(functions) == 1:
        return functions[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": functions}}


def _write_format(form: Format | None) -> JsonObject | None:
    if form is None:
        return None
    if form.schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}


def _read_named_choice(
    chosen: Fields, name_chosen: Callable[[Fields], str]
) -> tuple[str, tuple[str, ...]]:
    """Return the mode and the names of the only functions that may be called."""
    if chosen.get("type") is None:
        raise fields.bad_field("tool_choice", "has no type; it is function or allowed_tools.")
    if chosen.get("type") != "allowed_tools":
        return "required", (name_chosen(chosen),)
    allowed = Fields(chosen.read_object("allowed_tools") or chosen, chosen.path)
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required") or not isinstance(mode, str):
        raise fields.bad_request(
            f"tool_choice.mode is {mode!r}; it is auto or required.", "tool_choice"
        )
    tools = allowed.read("tools", list) or ()
    return mode, tuple(name_chosen(Fields(tool, "tool_choice")) for tool in tools)
