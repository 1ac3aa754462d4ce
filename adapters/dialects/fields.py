"""The fields of a client's body: each of the kind it must be, or refused by its name."""

from collections.abc import Mapping
from typing import Any

from adapters.calls import Refused

Body = Mapping[str, Any]
MOST_STOPS = 16


def bad(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """The refusal of a request that is wrong in itself."""
    return Refused(400, message, param=param, code=code)


def kind(value: object) -> str:
    """What JSON calls a value of this kind."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def body_of(value: object) -> Body:
    """The body, which names a model."""
    if not isinstance(value, dict):
        raise bad(f"The body is {kind(value)}; send a JSON object.")
    if not typed(value, "model", str, "a string"):
        raise bad("There is no model; name one, any name will do.", "model")
    return value


def typed(body: Body, name: str, kinds: Any, article: str, where: str = "") -> Any:
    """The field, or None. JSON's true is no number, though Python's is."""
    value = body.get(name)
    wrong_bool = isinstance(value, bool) and kinds is not bool
    if value is not None and (wrong_bool or not isinstance(value, kinds)):
        field = where + name
        raise bad(f"{field} is {kind(value)}; it must be {article}.", field)
    return value


def listed(body: Body, name: str, where: str = "") -> list[Any]:
    """The array, empty where there is none."""
    return typed(body, name, list, "an array", where) or []


def object_of(body: Body, name: str, where: str = "") -> dict[str, Any]:
    """The object, empty where there is none."""
    return typed(body, name, dict, "an object", where) or {}


def check_ranges(body: Body, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a number that is none, or out of its range."""
    for name, (least, most) in ranges.items():
        value = typed(body, name, (int, float), "a number")
        if value is not None and not least <= value <= most:
            raise bad(f"{name} is {value}; it goes from {least} to {most}.", name)


def at_least_one(body: Body, *names: str) -> int | None:
    """The first of these fields that is set, a whole number above 0; None if none is."""
    values = [typed(body, name, int, "an integer") for name in names]
    for name, value in zip(names, values, strict=True):
        if value is not None and value < 1:
            raise bad(f"{name} is {value}; it must be at least 1.", name)
    return next((value for value in values if value is not None), None)


def stops(body: Body, name: str) -> list[str]:
    """The stop strings; one may stand by itself."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else listed(body, name)
    if len(found) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in found):
        raise bad(f"{name} must be a string or up to {MOST_STOPS} of them, none empty.", name)
    return found


def text_of(content: Any, kinds: tuple[str, ...], where: str) -> str:
    """The text of a message's content, which may be in parts of these kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} is {kind(content)}; it must be text or an array of parts.", where)
    return "".join(_text_part(part, kinds, f"{where}[{i}]") for i, part in enumerate(content))


def _text_part(part: Any, kinds: tuple[str, ...], where: str) -> str:
    named = part.get("type") if isinstance(part, dict) else kind(part)
    text = part.get("refusal" if named == "refusal" else "text") if named in kinds else None
    if not isinstance(text, str):
        raise bad(f"{where} is a part of the type {named!r}; only text is read here.", where)
    return text
