"""What OpenAI's two dialects write alike: numbers, the choice of a tool, the form of an answer."""

from collections.abc import Sequence
from typing import Any

from adapters.calls import Choice, Completion, Format, Refused, Request
from adapters.chat import Chat
from adapters.dialects.fields import Body, bad, check_ranges, kind, listed, object_of, typed
from adapters.dialects.structured import format_of

MODES = ("auto", "none", "required")
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def check_sampling(body: Body) -> None:
    """Refuse what is no number, and the alternatives to a token that no sampler here tells."""
    check_ranges(body, NUMBERS)
    for name, kinds, article in (
        ("seed", int, "an integer"),
        ("stream", bool, "a boolean"),
        ("parallel_tool_calls", bool, "a boolean"),
    ):
        typed(body, name, kinds, article)
    alternatives = typed(body, "top_logprobs", int, "an integer")
    if alternatives:
        raise bad(
            f"top_logprobs is {alternatives}; only the log-probability of the sampled token is "
            "known here, so leave it out.",
            "top_logprobs",
        )


def choice(body: Body, tools: Sequence[dict[str, Any]]) -> Choice:
    """Which tools the answer is asked to call, of those in the form of chat completions."""
    parallel = body.get("parallel_tool_calls") is not False
    chosen = body.get("tool_choice")
    if isinstance(chosen, str) and chosen in MODES:
        mode, names = chosen, ()
    elif isinstance(chosen, dict):
        mode, names = _named(chosen)
    elif chosen is None:
        mode, names = "auto", ()
    else:
        text = f"tool_choice is {chosen!r}; it is one of {', '.join(MODES)}, or names a function."
        raise bad(text, "tool_choice")
    check_offered(mode, names, tools)
    return Choice(mode, names, parallel)


def check_offered(mode: str, names: Sequence[str], tools: Sequence[dict[str, Any]]) -> None:
    """Refuse the choice of a function that is not among the tools (as chat completions has them).

    So too a call that must be made where there is nothing to call.
    """
    offered = [tool["function"]["name"] for tool in tools]
    if mode == "required" and not offered:
        raise bad("tool_choice asks for a call, and there are no tools; send some.", "tool_choice")
    for name in names:
        if name not in offered:
            text = f"tool_choice names {name!r}; the tools are: {', '.join(offered) or 'none'}."
            raise bad(text, "tool_choice")


def form(value: Any, where: str) -> Format | None:
    """The form that `value` asks for: of free text there is none.

    Chat completions put name and schema into an object of their own, responses beside the type.
    """
    if value is None:
        return None
    named = value.get("type") if isinstance(value, dict) else kind(value)
    if named == "text":
        return None
    if named == "json_object":
        return Format()
    if named != "json_schema":
        raise bad(f"{where}.type is {named!r}; it is text, json_object or json_schema.", where)
    inner = "json_schema" in value
    written = object_of(value, "json_schema", f"{where}.") if inner else value
    place = f"{where}.json_schema." if inner else f"{where}."
    return format_of(typed(written, "schema", dict, "an object", place), f"{place}schema")


def logprobs(completion: Completion, chat: Chat) -> list[dict[str, Any]]:
    """Aligned with the token ids, so with the end-of-turn token, like vLLM's."""
    found = []
    for token, logprob in zip(completion.sampled_tokens, completion.logprobs, strict=True):
        text, data = chat.spelling(token)
        found.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return found


def error(refused: Refused) -> dict[str, Any]:
    """The body of a refusal."""
    kinds = "invalid_request_error" if refused.status < 500 else "server_error"
    shown = {"message": refused.message, "type": kinds}
    return {"error": {**shown, "param": refused.param, "code": refused.code}}


def spelt(request: Request) -> dict[str, Any]:
    """What each dialect spells in its own way, as chat completions do; None if not asked for."""
    return {
        "max_tokens": request.max_tokens,
        "max_completion_tokens": None,
        "stop": list(request.stop) or None,
        "tool_choice": _spelt_choice(request.choice),
        "parallel_tool_calls": None if request.choice.parallel else False,
        "response_format": request.fields.get("response_format") or _spelt_form(request.format),
    }


def _spelt_choice(choice: Choice) -> Any:
    functions = [{"type": "function", "function": {"name": name}} for name in choice.names]
    if not functions:
        return None if choice.mode == "auto" else choice.mode
    if choice.mode == "required" and len(functions) == 1:
        return functions[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": functions}}


def _spelt_form(form: Format | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}


def _named(chosen: Body) -> tuple[str, tuple[str, ...]]:
    """The mode and the only functions that may be called."""
    kinds = chosen.get("type")
    if kinds == "function":
        return "required", (_name(chosen),)
    if kinds != "allowed_tools":
        text = f"tool_choice is of the type {kinds!r}; only function and allowed_tools are known."
        raise bad(text, "tool_choice")
    allowed = object_of(chosen, "allowed_tools", "tool_choice.") or chosen
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise bad(f"tool_choice.mode is {mode!r}; it is auto or required.", "tool_choice")
    return mode, tuple(_name(tool) for tool in listed(allowed, "tools", "tool_choice."))


def _name(tool: Any) -> str:
    """The name of a function, which chat completions put into an object of its own."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad("tool_choice names no function; give its name.", "tool_choice")
    return name
