"""What a client asks of an answer beside its text → the instruction that the model is shown."""

import json

from adapters.calls import Request


def instruction_of(request: Request) -> str:
    """Return the instruction that the model is shown after the messages, empty if there is none.

    It comes last since it concerns one answer only: a conversation continues from its own tokens
    whatever format its next answer has.
    """
    return " ".join([*_tool_instructions(request), *_format_instruction(request)])


def _tool_instructions(request: Request) -> list[str]:
    choice = request.choice
    if not request.tools:
        return []
    if choice.mode == "none":
        return ["Call no function; answer in words."]
    said = ["Call a function."] if choice.mode == "required" else []
    if choice.names:
        said.append(f"Call no other function than {' or '.join(choice.names)}.")
    if not choice.parallel:
        said.append("Call at most one function.")
    return said


def _format_instruction(request: Request) -> list[str]:
    if request.format is None:
        return []
    schema = request.format.schema
    start = "Unless you call a function, answer" if request.may_call_tools else "Answer"
    if schema is None:
        return [f"{start} with nothing but a JSON object."]
    written = json.dumps(schema, ensure_ascii=False)
    return [f"{start} with nothing but JSON that fits this schema: {written}"]
