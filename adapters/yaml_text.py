"""YAML as values of JSON: one reading of every file and every `--set`.

Words are read by the core schema of YAML 1.2, in which `on`, `off`, `yes` and `no` are text, and so
are dates and `1:30`. Keys are text. What write_yaml writes has the same values in YAML 1.1.
"""

import re
from typing import Any, ClassVar

import yaml

Json = Any
"""A value of JSON."""

MOST_LETTERS = 1_000_000
TAG = "tag:yaml.org,2002:"

PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

DIGITS = r"(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
WORDS = {
    "null": "|~|null|Null|NULL",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": rf"[-+]?({DIGITS})|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
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

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Json]:
        """Read a mapping with its merged entries; a key of its own that is there twice is refused.

        PyYAML itself would take the last of them.
        """
        own: list[Any] = []
        for key, _ in node.value:
            if key.value in own:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                )
            own.append(key.value)
        self.flatten_mapping(node)
        for key, _ in node.value:
            key.tag = f"{TAG}str"
        return super().construct_mapping(node, deep)


class _OlderReader(_Reader):
    """Reader of files of other programs, which mean the truth values of YAML 1.1."""


class _Dumper(yaml.SafeDumper):
    """Writer that quotes what a reader of YAML 1.1 or of YAML 1.2 would not take as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _resolve(kind: Any, tag: str, pattern: str) -> None:
    kind.add_implicit_resolver(TAG + tag, re.compile(rf"(?:{pattern})\Z"), None)


for _tag, _pattern in WORDS.items():
    _resolve(_Reader, _tag, _pattern)
    _resolve(_Dumper, _tag, _pattern)
_resolve(_OlderReader, "bool", OLDER_TRUTHS)
# Depth first, so that a mapping is read before another one merges it.
_Reader.add_constructor(f"{TAG}map", lambda reader, node: reader.construct_mapping(node, deep=True))


def read_yaml(text: str, *, older: bool = False) -> Json:
    """Read the values of a text, with the truth values of YAML 1.1 if it is older; or YamlError."""
    if len(text) > MOST_LETTERS:
        raise YamlError(f"it has {len(text):,} letters, and {MOST_LETTERS:,} are read at most")
    try:
        return yaml.load(text, Loader=_OlderReader if older else _Reader)
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(at + said) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None


def write_yaml(value: Json) -> str:
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=False, width=float("inf"), sort_keys=False
    )
