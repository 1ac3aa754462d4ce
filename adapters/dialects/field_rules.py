"""What becomes of each field of a request: the one table that the door and its page in docs read.

A field of no row is refused by its name. A value of null is the same as no field.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ratchet.adapters.dialects.fields import Fields, bad_field
from ratchet.adapters.yaml_text import read_yaml


class Api(StrEnum):
    CHAT = "chat completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GOOGLE = "generateContent"


class Fate(StrEnum):
    HONOURED = "honoured"
    HINT = "hint"
    """Obeyed as far as a policy has a setting for it; otherwise the record names the field."""
    SAMPLING = "sampling"
    """Said by the recipe in a run, and by the client where `ratchet serve` answers."""
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """The fate of fields, and why.

    Values of `unless` ask for nothing, so they are not refused, or are no hints that nobody obeys.
    """

    names: tuple[str, ...]
    fate: Fate
    why: str
    unless: tuple[object, ...]
    apis: tuple[Api, ...]

    def excepts(self, value: object) -> bool:
        """Return whether a value asks for nothing; JSON's false is not the number 0."""
        same = (one for one in self.unless if isinstance(one, bool) == isinstance(value, bool))
        return value is None or value in same


RULES = tuple(
    Rule(
        tuple(row["names"]),
        Fate(row["fate"]),
        row["why"],
        tuple(row.get("unless", ())),
        tuple(Api[api.upper()] for api in row["of"]),
    )
    for row in read_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


def rules_of(api: Api) -> dict[str, Rule]:
    """Return the rule of each field that an API is known to have."""
    return {name: rule for rule in RULES if api in rule.apis for name in rule.names}


def check_fields(sent: Fields, api: Api, passed: Collection[str] = ()) -> None:
    """Refuse by its name a field that is not honoured; `passed` are fields that the model takes."""
    rules = rules_of(api)
    for name, value in sent.items():
        rule = rules.get(name)
        if value is None or name in passed:
            continue
        if rule is None:
            raise bad_field(name, f"is no field of {api} that is known here; leave it out.")
        if rule.fate is Fate.REFUSED and not rule.excepts(value):
            raise bad_field(name, f"is not honoured here: {rule.why}.")


def find_hints(sent: Fields, api: Api, passed: Collection[str] = ()) -> list[str]:
    """Return the paths of the hints in a body that no policy has a setting for."""
    hints = ((name, rule) for name, rule in rules_of(api).items() if rule.fate is Fate.HINT)
    return [
        name
        for name, rule in hints
        if name not in passed and not rule.excepts(_value_at(sent, name.split(".")))
    ]


def _value_at(sent: Mapping[str, object], path: Sequence[str]) -> object:
    value: object = sent
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def write_table() -> str:
    """Write the rules of the fields that change an answer, as a table of Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "| field | of | what becomes of it |"
    yield "|---|---|---|"
    for rule in (rule for rule in RULES if rule.fate not in {Fate.REFUSED, Fate.HARMLESS}):
        names = ", ".join(f"`{name}`" for name in rule.names)
        others = [api for api in Api if api not in rule.apis]
        apis = ", ".join(rule.apis) if others[1:] else f"all but {others[0]}" if others else "all"
        told = rule.why if rule.fate is Fate.SAMPLING else f"{rule.fate}: {rule.why}"
        yield f"| {names} | {apis} | {told} |"
