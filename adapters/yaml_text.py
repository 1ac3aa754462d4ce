"""YAML as values of JSON: one reading of every file and every `--set`, within bounds.

Words are read by the core schema of YAML 1.2, in which `on`, `off`, `yes` and `no` are text, and so
are dates and `1:30`. Keys are text. What write_yaml writes has the same values in YAML 1.1.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

Json = Any
"""A value of JSON."""

MOST_LETTERS = 1_000_000
MOST_NODES = 20_000
"""Values of a text, where each alias counts as all values that it stands for."""
DEEPEST_YAML = 50
MOST_DIGITS = 100

CORE = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
"""Truth values of YAML 1.2."""
YAML_1_1 = CORE | {
    word: truth
    for truth, words in ((True, ("yes", "on")), (False, ("no", "off")))
    for name in words
    for word in (name, name.title(), name.upper())
}
"""Truth values of YAML 1.1, by which files of other programs are meant."""

NULLS = ("", "~", "null", "Null", "NULL")
INTEGER = re.compile(r"[-+]?[0-9]+")
PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
OCTAL = re.compile(r"[-+]?0[0-9]+")
"""Integers that YAML 1.1 takes as octal numbers, and YAML 1.2 as decimal ones."""
TYPE_TAGS = {type(None): "null", bool: "bool", int: "int", float: "float"}
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
YAML_TAG = "tag:yaml.org,2002:"
MERGE = "<<"

PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlError(ValueError):
    """Refusal of a text that is no YAML, or is beyond the bounds: the fact, with its line."""


class _Dumper(yaml.SafeDumper):
    """Writer that quotes what a reader of YAML 1.1 or of YAML 1.2 would not take as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class _OneLine(_Dumper):
    """Writer of one line, in which texts are in double quotes."""


for _kind, _pattern in (("float", FLOAT), ("int", PREFIXED), ("int", OCTAL)):
    _whole = re.compile(f"^(?:{_pattern.pattern})$")
    _Dumper.add_implicit_resolver(f"{YAML_TAG}{_kind}", _whole, list("-+.0123456789"))


def _in_double_quotes(dumper: _OneLine, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{YAML_TAG}str", text, style='"')  # pyright: ignore


_OneLine.add_representer(str, _in_double_quotes)


def read_yaml(text: str, truths: Mapping[str, bool] = CORE) -> Json:
    """Read the values of a text, with these words for truth values; YamlError if it has none."""
    if LONE_SURROGATE.search(text):
        raise YamlError("it holds half a letter (a lone surrogate)")
    if len(text) > MOST_LETTERS:
        raise YamlError(f"it has {len(text):,} letters, and {MOST_LETTERS:,} are read at most")
    try:
        return _Reader(yaml.parse(text, Loader=PARSER), truths).document()
    except yaml.MarkedYAMLError as error:
        said = " ".join(str(error.problem or error.context).split())
        raise _error(said, error.problem_mark or error.context_mark) from None
    except yaml.reader.ReaderError as error:
        raise YamlError(
            f"letter {error.position + 1} is not allowed in YAML: {error.reason}"
        ) from None


def write_yaml(value: Json, *, in_one_line: bool = False) -> str:
    """Write a value of JSON, in the order of its keys."""
    written = yaml.dump(
        value,
        Dumper=_OneLine if in_one_line else _Dumper,
        default_flow_style=in_one_line,
        width=float("inf"),
        allow_unicode=in_one_line,
        sort_keys=False,
    )
    return written.removesuffix("...\n").strip() if in_one_line else written


def _error(said: str, mark: yaml.Mark | None) -> YamlError:
    at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return YamlError(at + said)


@dataclass
class _Reader:
    """The values of a parser's events, and how many there are of them."""

    events: Iterator[Any]
    truths: Mapping[str, bool]
    nodes: int = 0
    anchors: dict[str, tuple[Json, int]] = field(default_factory=dict[str, tuple[Json, int]])
    """The value of each anchor, and how many values that is."""

    def document(self) -> Json:
        """Read the only document; an empty one is null."""
        next(self.events)
        if not isinstance(next(self.events), yaml.DocumentStartEvent):
            return None
        value = self.value(next(self.events), 1)
        next(self.events)
        if not isinstance(again := next(self.events), yaml.StreamEndEvent):
            raise _error("a second document begins, and one is read", again.start_mark)
        return value

    def value(self, event: Any, depth: int) -> Json:
        """Read the value that begins with an event."""
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        before = self.nodes
        self.count(1, event)
        if depth > DEEPEST_YAML:
            raise _error(
                f"values lie in each other more than {DEEPEST_YAML} deep", event.start_mark
            )
        if isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            _check_tag(event, "seq")
            value = [self.value(entry, depth + 1) for entry in self.until(yaml.SequenceEndEvent)]
        else:
            _check_tag(event, "map")
            value = self.mapping(depth)
        if event.anchor:
            self.anchors[event.anchor] = value, self.nodes - before
        return value

    def until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def alias(self, event: Any) -> Json:
        """Return what an alias stands for."""
        if event.anchor not in self.anchors:
            said = f"the alias *{event.anchor} stands for no value that ends before it"
            raise _error(said, event.start_mark)
        value, nodes = self.anchors[event.anchor]
        self.count(nodes, event)
        return value

    def count(self, nodes: int, event: Any) -> None:
        self.nodes += nodes
        if self.nodes > MOST_NODES:
            said = f"there are more than {MOST_NODES:,} values, each alias counted as what it is"
            raise _error(said, event.start_mark)

    def mapping(self, depth: int) -> dict[str, Json]:
        """Read the entries of a mapping; those that it merges stand below its own."""
        own: dict[str, Json] = {}
        merged: dict[str, Json] = {}
        for event in self.until(yaml.MappingEndEvent):
            key = self.key(event)
            value = self.value(next(self.events), depth + 1)
            if key == MERGE and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                _merge(merged, value, event)
            elif key in own:
                raise _error(f"the key {key[:MOST_DIGITS]} is there twice", event.start_mark)
            else:
                own[key] = value
        return {**merged, **own}

    def key(self, event: Any) -> str:
        """Read a key, which is the text as it stands."""
        key = self.alias(event) if isinstance(event, yaml.AliasEvent) else event
        if isinstance(key, yaml.ScalarEvent):
            self.count(1, event)
            if event.anchor:
                self.anchors[event.anchor] = key.value, 1
            key = _checked(cast(str, key.value), event)
        if not isinstance(key, str):
            raise _error("a key is no text", event.start_mark)
        return key

    def scalar(self, event: Any) -> Json:
        text = _checked(event.value, event)
        plain = event.implicit[0] or event.tag not in (None, "!", f"{YAML_TAG}str")
        value = self.word(text, event) if plain else text
        if event.tag == f"{YAML_TAG}float" and type(value) is int:
            return float(value)
        _check_tag(event, TYPE_TAGS.get(type(value), "str"))
        return value

    def word(self, text: str, event: Any) -> Json:
        """Return what a word without quotes is: null, a truth value, a number or text."""
        if text in NULLS:
            return None
        if text in self.truths:
            return self.truths[text]
        if not any(number.fullmatch(text) for number in (INTEGER, PREFIXED, FLOAT)):
            return text
        if len(text) > MOST_DIGITS:
            said = f"a number has {len(text):,} digits, and {MOST_DIGITS} are read at most"
            raise _error(said, event.start_mark)
        if OCTAL.fullmatch(text):
            said = (
                f"{text} is octal in YAML 1.1 and decimal in YAML 1.2; write it without the zero "
                "in front, or in quotes if it is text"
            )
            raise _error(said, event.start_mark)
        if INTEGER.fullmatch(text):
            return int(text)
        if PREFIXED.fullmatch(text):
            return int(text, 0)
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _merge(merged: dict[str, Json], value: Json, event: Any) -> None:
    """Add the entries of what a merge key names, one mapping or several, that are not there yet."""
    for one in cast(list[Json], value if isinstance(value, list) else [value]):
        if not isinstance(one, Mapping):
            raise _error("<< merges a value that has no keys", event.start_mark)
        for key, entry in cast(Mapping[str, Json], one).items():
            merged.setdefault(key, entry)


def _checked(text: str, event: Any) -> str:
    """Return a text that a file's name may hold; YamlError if it holds NUL."""
    if "\0" in text:
        raise _error("a text holds NUL (\\0)", event.start_mark)
    return text


def _check_tag(event: Any, kind: str) -> None:
    if event.tag not in (None, "!", YAML_TAG + kind):
        said = "a tag (!…) stands before a value that it does not fit; leave it out"
        raise _error(said, event.start_mark)
