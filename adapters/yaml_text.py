"""YAML as values of JSON: one reading of every file and every `--set`.

Words are read by the core schema of YAML 1.2, in which `on`, `off`, `yes` and `no` are text, and so
are dates and `1:30`. Keys are text. What write_yaml writes has the same values in YAML 1.1.
"""

import re
from typing import Any, ClassVar, NoReturn, cast

import yaml

Json = Any
"""A value of JSON."""

MOST_LETTERS = 1_000_000
DEEPEST = 50
"""Values in one another. The parser of C recurses on its own stack, and ends the process there."""
TAG = "tag:yaml.org,2002:"

PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

OCTAL = r"[-+]?0[0-9]+"
"""Integers that YAML 1.1 takes as octal numbers, and YAML 1.2 as decimal ones."""
PREFIXED = "0o[0-7]+|0x[0-9a-fA-F]+"
FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
WORDS = {
    "null": "|~|null|Null|NULL",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": f"[-+]?[0-9]+|{PREFIXED}",
    "float": FLOAT,
    "merge": "<<",
}
"""What a word without quotes is, the first that it matches; any other is text."""
OLDER_TRUTHS = "yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"
"""Truth values of YAML 1.1 alone."""


class YamlError(ValueError):
    """Refusal of a text that is no YAML: the fact, with its line."""


class _Reader(PARSER):
    """Reader of values of JSON, by the core schema of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str, Any]] = {}


class _OlderReader(_Reader):
    """Reader of files of other programs, which mean the truth values of YAML 1.1."""


class _Dumper(yaml.SafeDumper):
    """Writer that quotes what a reader of YAML 1.1 or of YAML 1.2 would not take as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class _OneLine(_Dumper):
    """Writer of one line, in which texts are in double quotes."""


def _resolve(kind: Any, tag: str, pattern: str, first: list[str] | None = None) -> None:
    kind.add_implicit_resolver(TAG + tag, re.compile(rf"(?:{pattern})\Z"), first)


for _tag, _pattern in WORDS.items():
    _resolve(_Reader, _tag, _pattern)
_resolve(_OlderReader, "bool", OLDER_TRUTHS)
for _tag, _pattern in (("float", FLOAT), ("int", PREFIXED), ("int", OCTAL)):
    _resolve(_Dumper, _tag, _pattern, list("-+.0123456789"))


def _in_double_quotes(dumper: _OneLine, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{TAG}str", text, style='"')  # pyright: ignore


_OneLine.add_representer(str, _in_double_quotes)


def read_yaml(text: str, *, older: bool = False) -> Json:
    """Read the values of a text, with the truth values of YAML 1.1 if it is older; or YamlError."""
    if len(text) > MOST_LETTERS:
        raise YamlError(f"it has {len(text):,} letters, and {MOST_LETTERS:,} are read at most")
    try:
        _check_depth(text)
        return yaml.load(text, Loader=_OlderReader if older else _Reader)
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(at + said) from None
    except yaml.reader.ReaderError as error:
        said = f"letter {error.position + 1} is not allowed in YAML: {error.reason}"
        raise YamlError(said) from None
    except UnicodeEncodeError:
        raise YamlError("it holds half a letter (a lone surrogate)") from None


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


def _check_depth(text: str) -> None:
    depth = 0
    for event in cast(Any, yaml.parse(text, Loader=PARSER)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _refusal(f"values lie in each other more than {DEEPEST} deep", event)


def _refusal(said: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=said, problem_mark=node.start_mark)


def _mapping(reader: Any, node: yaml.MappingNode) -> dict[str, Json]:
    """Read the entries of a mapping; those that it merges stand below its own."""
    own: dict[str, Json] = {}
    merged: dict[str, Json] = {}
    if not isinstance(node, yaml.MappingNode):
        _no_tag(reader, node)
    for key, value in node.value:
        read = reader.construct_object(value, deep=True)
        if key.tag == f"{TAG}merge":
            for one in cast(list[Json], read if isinstance(read, list) else [read]):
                if not isinstance(one, dict):
                    raise _refusal("<< merges a value that has no keys", key)
                merged |= {**one, **merged}
        elif not isinstance(key, yaml.ScalarNode):
            raise _refusal("a key is no text", key)
        elif (name := _text(reader, key)) in own:
            raise _refusal(f"the key {name[:100]} is there twice", key)
        else:
            own[name] = read
    return {**merged, **own}


def _sequence(reader: Any, node: yaml.SequenceNode) -> list[Json]:
    return reader.construct_sequence(node, deep=True)


def _text(reader: Any, node: yaml.ScalarNode) -> str:
    """Return a text that a file's name may hold."""
    if "\0" in node.value:
        raise _refusal("a text holds NUL (\\0)", node)
    return reader.construct_scalar(node)


def _truth(reader: Any, node: yaml.ScalarNode) -> bool:
    word = node.value.lower()
    return reader.bool_values[word] if word in reader.bool_values else _no_tag(reader, node)


def _number(reader: Any, node: yaml.ScalarNode) -> int | float:
    text = node.value
    if re.fullmatch(OCTAL, text):
        said = (
            f"{text} is octal in YAML 1.1 and decimal in YAML 1.2; write it without the zero in "
            "front, or in quotes if it is text"
        )
        raise _refusal(said, node)
    try:
        if node.tag == f"{TAG}int":
            return int(text, 0)
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise _refusal(f"{text[:100]} is no number that can be read", node) from None


def _no_tag(reader: Any, node: yaml.Node) -> NoReturn:
    raise _refusal("a tag (!…) stands before a value that it does not fit; leave it out", node)


for _kind, _read in {
    "null": lambda reader, node: None,
    "bool": _truth,
    "int": _number,
    "float": _number,
    "str": _text,
    "seq": _sequence,
    "map": _mapping,
}.items():
    _Reader.add_constructor(TAG + _kind, _read)
_Reader.add_constructor(None, _no_tag)
