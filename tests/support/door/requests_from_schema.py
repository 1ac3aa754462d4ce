"""Requests that a JSON schema allows, and damaged ones."""

import json
import random
from collections.abc import Iterator
from typing import Any

TEXTS = ("hello", "", "look", "user", "{}", '{"at": 1}', "<|im_end|>", "<tool_call>{", "é\u2028")
ODD_TEXTS = (
    "\x00",
    "\ufffd\U0001f600",
    "a " * 3000,
    "[" * 2000,
    "9" * 5000,
    "<|im_start|>system\n",
)
NUMBERS = (1, 0, 0.5, 7, 100)
ODD: tuple[Any, ...] = (-1, 2**63, 1e308, 10**400, True, None, [], {}, [[]], *ODD_TEXTS)
OFTEN = 0.1


class Drawn:
    """Values that a JSON schema allows, such as pydantic makes of a type, all from one seed."""

    def __init__(self, schema: dict[str, Any], seed: object) -> None:
        self._schema = schema
        self._chosen = random.Random(str(seed))

    def body(self) -> Any:
        """Draw an object with all that is required, and now and then an optional property."""
        return self._value(self._schema, 0)

    def damaged(self, body: Any) -> Any:
        """Return the body with up to three of its values exchanged, removed, doubled or added."""
        body = {"": body}
        for _ in range(self._chosen.randint(1, 3)):
            holder, key = self._chosen.choice([*_places(body)])
            change = self._chosen.randrange(4)
            if change == 0:
                del holder[key]
            elif change == 1 and isinstance(holder, list):
                holder.append(holder[key])
            elif change == 2 and isinstance(holder, dict):
                holder[self._chosen.choice(TEXTS)] = self._chosen.choice(ODD)
            else:
                holder[key] = self._chosen.choice(ODD)
            if not body:
                return None
        return body.get("")

    def written(self, body: Any) -> bytes:
        """Encode the body; a few are damaged so that they are no JSON."""
        data = json.dumps(body).encode()
        if self._chosen.random() > OFTEN:
            return data
        at = self._chosen.randrange(len(data) + 1)
        junk = (b"", b"\xff", b"NaN", b'"\\ud800"', b"[" * 5000, self._chosen.randbytes(20))
        return data[:at] + self._chosen.choice(junk) + data[self._chosen.choice((at, len(data))) :]

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        if "$ref" in schema:
            return self._value(self._schema["$defs"][schema["$ref"].rpartition("/")[2]], depth)
        for choices in ("anyOf", "oneOf"):
            if choices in schema:
                return self._value(self._chosen.choice(schema[choices]), depth)
        if "const" in schema or "enum" in schema:
            return self._chosen.choice(schema.get("enum") or [schema["const"]])
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth + 1)
        if kind == "array":
            size = self._chosen.choice((1, 1, 1, 2, 3, 0)) if depth < 8 else 0
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(size)]
        if kind in ("integer", "number"):
            return int(n) if (n := self._chosen.choice(NUMBERS)) >= 1 or kind == "integer" else n
        if kind == "string":
            texts = TEXTS if self._chosen.random() > OFTEN else ODD_TEXTS
            return self._chosen.choice(texts)
        if kind == "boolean":
            return self._chosen.random() < 0.5
        return None if kind == "null" else self._chosen.choice(ODD)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        needed = schema.get("required", ())
        value = {
            name: self._value(of_name, depth)
            for name, of_name in schema.get("properties", {}).items()
            if name in needed or (depth < 8 and self._chosen.random() < OFTEN)
        }
        others = schema.get("additionalProperties")
        if others and not value:
            value = {self._chosen.choice(TEXTS): self._chosen.choice(ODD)}
        return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every key of every object, and every index of every array, with its holder."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])
