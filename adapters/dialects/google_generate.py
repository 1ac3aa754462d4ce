"""Google's generateContent: bodies read as requests, completions written as answers or streams.

The path of a request, and not its body, names the model and says whether the answer is streamed.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
from ratchet.adapters.rendering.messages import create_tool_call, json_type, parse_text, read_tool

GENERATION = "generationConfig"
SAMPLED_BY = {"temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed"}
"""Numbers by which an answer is sampled, and their names in the other dialects."""
MODES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
DECLARED = "functionDeclarations"
BUDGET = "thinkingBudget"
STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    503: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class GenerateContent:
    """The dialect of a request, by what its path says."""

    model: str
    streams: bool = False
    as_events: bool = True

    def read(self, body: object, passed: Collection[str] = ()) -> Request:
        """Read a body; `passed` are fields that the model takes although no policy does."""
        if not isinstance(body, dict):
            raise fields.bad_request(f"The body is {json_type(body)}; send a JSON object.")
        if self.streams and not self.as_events:
            raise fields.bad_field("alt", "is not sse; a stream is written as events here.")
        counted = body.get("generateContentRequest")
        sent = Fields(body if counted is None else counted)
        config = sent.read_object(GENERATION)
        thinking = config.read_object("thinkingConfig")
        tools, left_out = _read_tools(sent)
        request = Request(
            model=self.model,
            messages=[*_read_system(sent), *_read_contents(sent)],
            tools=tools,
            max_tokens=config.read_count("maxOutputTokens"),
            stop=config.read_stops("stopSequences"),
            fields={
                **sent.without("contents", "systemInstruction", "tools"),
                **_read_sampling(config),
                "stream": self.streams,
            },
            format=_read_format(config),
            choice=_read_choice(sent, tools),
            thinking=fields.no_thinking(thinking.read(BUDGET, int) == 0, thinking.path_of(BUDGET)),
            left_out=left_out,
            hints=fields.find_hints(sent, Api.GOOGLE, passed),
            dialect="generateContent",
        )
        told = {name.replace(".", "\\."): sent[name] for name in sent.without(GENERATION)}
        told |= {f"{GENERATION}.{name}": value for name, value in config.items()}
        fields.check_fields(Fields(told), Api.GOOGLE, passed)
        return request

    @staticmethod
    def answer(completion: Completion, *_: object) -> JsonObject:
        return _chunk(completion, _parts(completion.message), ends=True)

    @staticmethod
    def stream(completion: Completion, chat: Chat, **_: object) -> Iterator[str]:
        """Yield the lines of the answer's stream: texts token by token, and each call whole."""
        said: list[JsonObject] = []
        for part in _parts(completion.message):
            text = part.get("text")
            pieces = chat.pieces(text) if isinstance(text, str) else []
            said += [{**part, "text": piece} for piece in pieces] or [part]
        *before, last = said
        for part in before:
            yield fields.write_data(_chunk(completion, [part]))
        yield fields.write_data(_chunk(completion, [last], ends=True))

    @staticmethod
    def wait(request: Request, name: str, *_: object) -> str:
        """Write an empty text: Google's client for Python takes no comments."""
        return fields.write_data({**_envelope([{"text": ""}]), **_names(request, name)})

    @staticmethod
    def write_late_error(refused: Refused, *_: object) -> str:
        return fields.write_data(GenerateContent.write_error(refused))

    @staticmethod
    def write_error(refused: Refused) -> JsonObject:
        status = STATUSES.get(refused.status, "INTERNAL")
        return {"error": {"code": refused.status, "message": refused.message, "status": status}}


def _read_system(sent: Fields) -> list[Message]:
    said = sent.get("systemInstruction")
    if not isinstance(said, str):
        parts = sent.read_object("systemInstruction").read_list("parts")
        said = "".join(
            _read_text(fields.check_object(part, path, "a part")) for part, path in parts
        )
    return [{"role": "system", "content": said}] if said else []


def _read_text(part: Fields) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        kinds = ", ".join(part) or "nothing"
        raise fields.bad_field(part.path, f"is a part with {kinds}; only text is read here.")
    return text


def _read_contents(sent: Fields) -> list[Message]:
    contents = sent.read_some("contents")
    read: list[Message] = []
    for content, path in contents:
        for message in _read_content(fields.check_object(content, path, "a content")):
            if read and read[-1]["role"] == message["role"] == "assistant":
                _add(read[-1], message)
            else:
                read.append(message)
    if read[-1]["role"] == "assistant":
        text = "The last content is the model's, and an answer cannot be continued here; "
        raise fields.bad_request(f"{text}end with a user's content.", contents[-1][1])
    return read


def _add(said: Message, further: Message) -> None:
    """Add to an answer what follows it: clients keep the pieces of a stream as contents."""
    said["content"] += further["content"]
    if thought := further.get("reasoning_content"):
        said["reasoning_content"] = said.get("reasoning_content", "") + thought
    if calls := further.get("tool_calls"):
        said.setdefault("tool_calls", []).extend(calls)


def _read_content(content: Fields) -> list[Message]:
    """Read a content into messages of chat completions, where each function's response is one."""
    role = content.read("role", str)
    if role not in (None, "user", "model", "function"):
        raise fields.bad_field(content.path_of("role"), f"is {role!r}; it is user or model.")
    parts = [fields.check_object(part, path, "a part") for part, path in content.read_list("parts")]
    if not parts:
        raise fields.bad_field(content.path_of("parts"), "is empty; send at least one part.")
    return [_read_answer(parts)] if role == "model" else _read_asked(parts)


def _read_answer(parts: Sequence[Fields]) -> Message:
    said: Message = {"role": "assistant", "content": ""}
    for part in parts:
        if "functionCall" in part:
            call = part.read_object("functionCall")
            name, arguments = call.read("name", str), dict(call.read_object("args"))
            if not name:
                raise fields.bad_field(call.path, "has no name of a function.")
            written = json.dumps(arguments, ensure_ascii=False)
            said.setdefault("tool_calls", []).append(
                create_tool_call(name, written, call.get("id"))
            )
        elif part.read("thought", bool):
            said["reasoning_content"] = said.get("reasoning_content", "") + _read_text(part)
        else:
            said["content"] += _read_text(part)
    return said


def _read_asked(parts: Sequence[Fields]) -> list[Message]:
    """Read a user's parts: each response is one message, and so is the text between responses."""
    heard: list[Message] = []
    for part in parts:
        if "functionResponse" in part:
            response = part.read_object("functionResponse")
            told, name = _read_response(response), response.read("id", str) or ""
            heard.append({"role": "tool", "content": told, "tool_call_id": name})
        elif heard and heard[-1]["role"] == "user":
            heard[-1]["content"] += _read_text(part)
        else:
            heard.append({"role": "user", "content": _read_text(part)})
    return heard


def _read_response(response: Fields) -> str:
    """Read what a function returned: its `output`, if that is a text alone, or all as JSON."""
    said = dict(response.read_object("response"))
    output = said.get("output")
    alone = isinstance(output, str) and len(said) == 1
    return str(output) if alone else json.dumps(said, ensure_ascii=False)


def _read_tools(sent: Fields) -> tuple[list[Tool], list[str]]:
    """Read the functions that the client runs, and the names of the other tools."""
    tools, left_out = list[Tool](), list[str]()
    for one, path in sent.read_list("tools"):
        tool = fields.check_object(one, path, "a tool")
        left_out += [name for name, value in tool.items() if name != DECLARED and value is not None]
        for declared, at in tool.read_list(DECLARED):
            function = fields.check_object(declared, at, "a function")
            tools.append(_read_function(function))
    fields.check_some_left(tools, left_out)
    return tools, left_out


def _read_function(function: Fields) -> Tool:
    if not isinstance(function.get("name"), str):
        raise fields.bad_field(function.path, "has no name.")
    schema = function.read("parametersJsonSchema", dict) or _lower(
        function.read("parameters", dict)
    )
    kept = {"name": function["name"], "description": function.read("description", str)}
    told = {
        key: value for key, value in {**kept, "parameters": schema}.items() if value is not None
    }
    return read_tool({"type": "function", "function": told}, function.path)


def _lower(schema: object) -> object:
    """Return a schema of Google's with the names of types that JSON Schema has."""
    if isinstance(schema, list):
        return [_lower(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) else _lower(value)
        for key, value in schema.items()
    }


def _read_sampling(config: Fields) -> JsonObject:
    """Read the numbers by which an answer is sampled, by their names in the other dialects."""
    config.check_ranges({"temperature": (0, 2), "topP": (0, 1)})
    numbers = {ours: config.read(name, fields.NUMBER) for name, ours in SAMPLED_BY.items()}
    whole = {name: int(number) for name in ("top_k", "seed") if (number := numbers[name])}
    return {name: number for name, number in (numbers | whole).items() if number is not None}


def _read_choice(sent: Fields, tools: Sequence[Tool]) -> Choice:
    chosen = sent.read_object("toolConfig").read_object("functionCallingConfig")
    mode = chosen.get("mode", "AUTO")
    mode = "AUTO" if mode is None else mode
    if not isinstance(mode, str) or mode not in MODES:
        raise fields.bad_field(
            chosen.path_of("mode"), f"is {mode!r}; it is one of {', '.join(MODES)}."
        )
    names = chosen.read("allowedFunctionNames", list) or []
    if not all(isinstance(name, str) for name in names):
        raise fields.bad_field(
            chosen.path_of("allowedFunctionNames"), "must be names of functions."
        )
    fields.check_offered(MODES[mode], names, tools, chosen.path)
    return Choice(MODES[mode], tuple(names))


def _read_format(config: Fields) -> Format | None:
    kind = config.read("responseMimeType", str)
    if kind not in (None, "text/plain", "application/json"):
        problem = f"is {kind!r}; it is text/plain or application/json."
        raise fields.bad_field(config.path_of("responseMimeType"), problem)
    plain, written = config.read("responseSchema", dict), "responseJsonSchema"
    schema = config.read(written, dict)
    if schema is None and plain is not None:
        schema, written = _lower(plain), "responseSchema"
    if isinstance(schema, dict):
        return Format(schema, config.path_of(written))
    return Format() if kind == "application/json" else None


def _parts(message: Message) -> list[JsonObject]:
    parts: list[JsonObject] = []
    if thought := message.get("reasoning_content"):
        parts.append({"text": thought, "thought": True})
    if message["content"]:
        parts.append({"text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], parse_text(call["function"]["arguments"])
        parts.append({"functionCall": {"id": call.get("id"), "name": name, "args": arguments}})
    return parts


def _envelope(parts: Sequence[JsonObject], **ending: str) -> JsonObject:
    return {"candidates": [{"index": 0, "content": {"role": "model", "parts": [*parts]}, **ending}]}


def _names(request: Request, name: str) -> JsonObject:
    return {"modelVersion": request.model, "responseId": name}


def _chunk(
    completion: Completion, parts: Sequence[JsonObject], *, ends: bool = False
) -> JsonObject:
    """Write an answer, or a piece of it; the last one has the reason of its end, and its usage."""
    names = _names(completion.request, completion.response_id)
    if not ends:
        return {**_envelope(parts), **names}
    reason = "MAX_TOKENS" if completion.finish_reason == "length" else "STOP"
    prompt, sampled = completion.token_counts
    usage = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled,
        "totalTokenCount": prompt + sampled,
    }
    return {**_envelope(parts, finishReason=reason), "usageMetadata": usage, **names}
