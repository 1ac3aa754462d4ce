"""What a client asks of an answer beside its text: the instruction that the model is shown for it.

An answer is never altered: one of another format is returned and recorded as it is.
"""

import json

from adapters.calls import Choice, JsonObject, Message, Request


def instruction_of(request: Request) -> str:
    """Return the instruction that the model is shown after the messages, empty if there is none.

    It comes last since it concerns one answer only: a conversation continues from its own tokens
    whatever format its next answer has.
    """
    return " ".join([*_tool_instructions(request), *_format_instruction(request)])


def choice_outcome(choice: Choice, message: Message) -> JsonObject:
    """Return whether an answer's tool calls are those that the client's choice allows."""
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    kept = (
        bool(called) >= (choice.mode == "required")
        and (not called or choice.mode != "none")
        and (not choice.names or set(called) <= {*choice.names})
        and (choice.parallel or len(called) <= 1)
    )
    asked = {"mode": choice.mode, "names": list(choice.names), "parallel": choice.parallel}
    return {**asked, "kept": kept}


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
