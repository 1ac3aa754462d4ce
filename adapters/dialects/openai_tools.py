"""The tools of OpenAI's responses as functions, the form in which models are trained.

A custom tool, whose input is a text, is shown as a function with the argument `input`. A function
of a namespace is shown as `NAMESPACE__NAME`. A shell, and an editor by patches, is a function of
what the items of its calls have.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ratchet.adapters.calls import JsonObject, Request, Tool, ToolCall
from ratchet.adapters.dialects.field_rules import Api
from ratchet.adapters.dialects.fields import Fields, bad_field, read_text, type_of
from ratchet.adapters.dialects.tool_types import TYPES, check_some_left, find_function
from ratchet.adapters.rendering.messages import create_tool_call, parse_text, read_tool

PLAIN, CUSTOM, NAMESPACE = "function", "custom", "namespace"
OF_FUNCTION = ("description", "parameters", "strict")
INPUT = "input"
OF_CALL, OUTPUT = "_call", "_call_output"
CONTENTS: Mapping[str, tuple[str, JsonObject]] = {
    "local_shell": ("action", {"type": "exec", "env": {}}),
    "shell": ("action", {}),
    "apply_patch": ("operation", {}),
}
"""By the type of a tool, the field of a call's item that has the arguments, and what is always in
it."""
CALLS = ("function_call", "custom_tool_call", *(kind + OF_CALL for kind in CONTENTS))
OUTPUTS = tuple(f"{call}_output" for call in CALLS)
PARTS = ("input_text", "output_text", "text", "refusal")


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as its client names it."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """The name that the model is shown."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class OfferedTools(NamedTuple):
    """The tools of a request: functions for the model, tools by these names, and types left out."""

    functions: list[Tool]
    named: dict[str, Offered]
    left_out: list[str]


def read_tools(sent: Fields) -> OfferedTools:
    """Read the tools of a body; refused if a tool is not known, or nobody could run any of them."""
    read = OfferedTools([], {}, [])
    for tool, path in sent.read_list("tools"):
        for offered, function in _read_tool(tool, path):
            if function is None:
                read.left_out.append(offered.name)
            elif read.named.setdefault(offered.shown, offered) != offered:
                problem = f"would be shown as {offered.shown}, as another tool is; rename one."
                raise bad_field(path, problem)
            else:
                read.functions.append(function)
    check_some_left(read.functions, read.left_out)
    return read


def name_chosen(chosen: Fields) -> str:
    """Return the name under which a tool is shown that a tool choice names."""
    kind, name = chosen.get("type", PLAIN), chosen.get("name")
    if isinstance(kind, str) and kind in CONTENTS:
        return kind
    if isinstance(kind, str) and (Api.RESPONSES, kind) in TYPES:
        raise bad_field("tool_choice", f"names {kind}, which the client does not run.")
    if kind not in (PLAIN, CUSTOM):
        problem = f"is of type {kind!r}; only function, custom and allowed_tools are known."
        raise bad_field("tool_choice", problem)
    if not isinstance(name, str):
        raise bad_field("tool_choice", "names no function; give its name.")
    return Offered(str(kind), name, chosen.read(NAMESPACE, str)).shown


def read_call(item: Fields) -> ToolCall:
    """Read an item that is a call of any tool."""
    kind, name = str(item.get("type")), item.get("name")
    arguments, text, call_id = item.get("arguments"), item.get(INPUT), item.get("call_id")
    if (built_in := kind.removesuffix(OF_CALL)) in CONTENTS:
        field, always = CONTENTS[built_in]
        said = item.read_object(field).items()
        given = {key: value for key, value in said if value not in (None, always.get(key))}
        return create_tool_call(built_in, json.dumps(given, ensure_ascii=False), call_id)
    if kind == "custom_tool_call":
        custom = json.dumps({INPUT: text}, ensure_ascii=False)
        arguments = custom if isinstance(text, str) else None
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise bad_field(item.path, "has no name and arguments, or input.")
    shown = Offered(kind, name, item.read(NAMESPACE, str)).shown
    return create_tool_call(shown, arguments, call_id)


def read_output(item: Fields) -> tuple[str, str]:
    """Return the text of an item that is a call's output, and the id of the call."""
    output, path, kind = item.get("output"), item.path_of("output"), item.get("type")
    own = item.read("id", str) if kind == f"local_shell{OUTPUT}" else None
    call_id = item.read("call_id", str) or own or ""  # a local shell's is the output's own
    if kind == f"shell{OUTPUT}" and isinstance(output, list):
        return json.dumps(output, ensure_ascii=False), call_id
    if kind == f"apply_patch{OUTPUT}" and output is None:
        output, path = item.get("status"), item.path_of("status")
    return read_text(output, path, PARTS), call_id


def tools_named(request: Request) -> Mapping[str, Offered]:
    """Return the tools of a request by the names that the model was shown."""
    return read_tools(Fields({"tools": request.fields.get("tools")})).named


def write_call(call: ToolCall, named: Mapping[str, Offered]) -> JsonObject:
    """Write a call as the item of the tool's own kind.

    Arguments that are no arguments of the tool are written as they are: its client refuses them.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool, said = named.get(name, Offered(PLAIN, name)), parse_text(arguments)
    of = {"call_id": call.get("id")}
    if tool.kind in CONTENTS and isinstance(said, dict):
        field, always = CONTENTS[tool.kind]
        return {"type": tool.kind + OF_CALL, **of, field: {**always, **said}}
    of |= {"name": tool.name} | ({} if tool.namespace is None else {NAMESPACE: tool.namespace})
    if tool.kind == CUSTOM:
        text = said.get(INPUT) if isinstance(said, dict) else None
        return {"type": "custom_tool_call", **of, INPUT: _as_text(arguments, text)}
    return {"type": "function_call", **of, "arguments": arguments}


def _as_text(arguments: object, text: object) -> str:
    if isinstance(text, str):
        return text
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read_tool(tool: object, path: str) -> Iterator[tuple[Offered, Tool | None]]:
    """Yield a tool, or those of a namespace, each with its function if the client runs it."""
    sent, kind = Fields(tool, path), type_of(tool)
    if kind != NAMESPACE:
        yield _read_single(sent, kind, None)
        return
    namespace = sent.read("name", str)
    if not namespace:
        raise bad_field(path, "has no name.")
    about = sent.read("description", str) or ""
    for inner, at in sent.read_list("tools"):
        offered, function = _read_single(Fields(inner, at), type_of(inner), namespace)
        if function is not None and about:
            own = function["function"].get("description", "")
            function["function"]["description"] = f"{about}\n\n{own}".strip()
            about = ""  # it is told once, with the first function of the group
        yield offered, function


def _read_single(sent: Fields, kind: object, namespace: str | None) -> tuple[Offered, Tool | None]:
    name = sent.get("name")
    if kind not in (PLAIN, CUSTOM):
        function, offered = (
            find_function(Api.RESPONSES, kind, sent.path),
            Offered(str(kind), str(kind)),
        )
        shown = {"type": PLAIN, "function": function}
        return offered, None if function is None else read_tool(shown, sent.path)
    if not isinstance(name, str):
        raise bad_field(sent.path, "has no name.")
    offered = Offered(str(kind), name, namespace)
    kept = {key: sent[key] for key in OF_FUNCTION if sent.get(key) is not None}
    if kind == CUSTOM:
        kept = {**kept, "parameters": _parameters_of_text(sent)}
    function = {"name": offered.shown, **kept}
    return offered, read_tool({"type": PLAIN, "function": function}, sent.path)


def _parameters_of_text(sent: Fields) -> JsonObject:
    """Return the parameters of a custom tool, with the grammar of its input if it has one."""
    form, text = sent.read_object("format"), {"type": "string"}
    if grammar := form.read("definition", str):
        syntax = form.read("syntax", str) or "given"
        text["description"] = f"A text of this {syntax} grammar:\n{grammar}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
