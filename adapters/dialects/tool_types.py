"""Tools that an API defines beside functions: which of them the client runs, and as what function.

A tool that the client does not run is left out of what the model is shown, and the record names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.adapters.calls import Tool, ToolFunction
from ratchet.adapters.dialects.field_rules import Api
from ratchet.adapters.dialects.fields import bad_field
from ratchet.adapters.yaml_text import read_yaml


@dataclass(frozen=True, slots=True)
class ToolType:
    """A type of tools: the function that the client runs, or why the type is refused.

    A type with neither is of tools that the client does not run.
    """

    function: ToolFunction | None
    refused: str


TYPES: Mapping[tuple[Api, str], ToolType] = {
    (Api[row["of"].upper()], name): ToolType(row.get("function"), row.get("refused", ""))
    for row in read_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for name in row["types"]
}


def find_function(api: Api, named: object, path: str) -> ToolFunction | None:
    """Return the function of a type of tools; None if the client does not run it."""
    found = TYPES.get((api, named)) if isinstance(named, str) else None
    if found is None:
        problem = f"is of type {named!r}, which is not known here; send it as a function."
        raise bad_field(path, problem)
    if found.refused:
        raise bad_field(path, f"is of type {named!r}: {found.refused}; leave it out.")
    return found.function


def check_some_left(functions: Sequence[Tool], left_out: Sequence[str]) -> None:
    """Refuse tools if the client runs not one of them, since an agent then lives on the others."""
    if left_out and not functions:
        problem = (
            f"are all run by the API's own service ({', '.join(left_out)}), and nothing but the "
            "model runs here; send a function that the client runs."
        )
        raise bad_field("tools", problem)
