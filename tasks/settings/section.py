"""The base class of a recipe's sections."""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc, getsource
from itertools import chain, pairwise
from typing import Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ratchet.adapters.errors import did_you_mean_key, instead_of
from ratchet.adapters.redaction import quote

Refusals = Iterator[tuple[bool, str]]
"""Rules between the keys of a section: whether each is broken, and what is then said."""

OTHERS = "*"
"""All keys of a section but the one that they need."""

MOST_STEPS = 10_000_000
MOST_ROLLOUTS = 1_000_000
"""The most rollouts of a step, and of an evaluation: more cannot be meant."""
TABLES = (
    *("roles", "judge.criteria", "evaluation.roles", "algorithm.loss_settings"),
    *("algorithm.advantage_settings", "preference.loss_settings", "dataset.columns"),
    *("dataset.sources", "rollouts.rewarded_errors", "shared", "stages", "evaluate", "base"),
)
"""Keys of a recipe whose entries have names of their own."""
LONGEST_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True)
class Needs:
    """Rule by which keys do nothing unless `other` is given or, with `values`, has one of them.

    With `each_other`, `other` does nothing without the keys as well. A key is given if it has not
    its default: `Needs("beta", "divergence", "jsd")` refuses a beta beside another divergence.
    """

    keys: str | tuple[str, ...]
    other: str
    values: str | tuple[str, ...] = ()
    each_other: bool = False

    def refusal(self, section: "Section") -> str | None:
        """Say how a section breaks the rule; None if it keeps it."""
        keys = (self.keys,) if isinstance(self.keys, str) else self.keys
        values = (self.values,) if isinstance(self.values, str) else self.values
        named = type(section).model_fields.keys() - {self.other} if OTHERS in keys else {*keys}
        given = [key for key in type(section).model_fields if key in named and section.gives(key)]
        has = getattr(section, self.other)
        met = has in values if values else section.gives(self.other)
        needed = f"{self.other} {' or '.join(values)}".rstrip()
        if self.each_other and bool(given) != met:
            beside = " and ".join(f"{key} {getattr(section, key)}" for key in keys)
            return (
                f"{self.other} {has} with {beside}: one without the other does nothing; give "
                f"{needed} and {' and '.join(keys)}, or neither"
            )
        if not given or met:
            return None
        return (
            f"{', '.join(map(section.say, given))} {'does' if len(given) == 1 else 'do'} nothing "
            f"{f'with {self.other} {has}' if values else f'without {self.other}'}; give {needed}, "
            f"or leave {'it' if len(given) == 1 else 'them'} out"
        )


class Section(BaseModel):
    """A part of the recipe: frozen; an unknown key, or a number that is not finite, is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    requirements: ClassVar[tuple[Needs, ...]] = ()
    """Rules of the class's own keys, which are checked before the refusals."""

    def refusals(self) -> Refusals:
        """Yield the other rules in the order of their checks; the first broken one is said."""
        yield from ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Explain the keys in Prefect's form."""
        schema, fields = handler(core_schema), explained(cls)
        for name, own in handler.resolve_ref_schema(schema)["properties"].items():
            own |= {"description": said} if (said := fields[name].description) else {}
        return schema

    def gives(self, name: str) -> bool:
        """Return whether a setting has not its default."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return getattr(self, name) != default

    def say(self, name: str) -> str:
        """Return a setting's name, with its value if that is a number or a word."""
        value = getattr(self, name)
        if isinstance(value, str) and value.isidentifier():
            return f"{name} {value}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"{name} {value:g}" if number else name

    def given(self, *names: str) -> str:
        """List those of the settings that are not their defaults."""
        return ", ".join(filter(self.gives, names))

    @model_validator(mode="after")
    def _no_rule_is_broken(self) -> Self:
        rules = (rule for kind in type(self).__mro__ for rule in vars(kind).get("requirements", ()))
        declared = ((why is not None, why) for why in (rule.refusal(self) for rule in rules))
        for broken, why in chain(declared, self.refusals()):
            if broken:
                raise ValueError(why)
        return self


def explained(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return a section's keys with their docstrings, which pydantic would read at every import."""
    for kind in (one for one in reversed(model.__mro__) if issubclass(one, Section)):
        for name, said in _docstrings(kind.__module__).get(kind.__name__, {}).items():
            if name in model.model_fields:
                model.model_fields[name].description = said
    return model.model_fields


@cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Read the docstrings of the attributes of each class of a module."""
    return {
        one.name: {
            ast.unparse(named.target): cleandoc(ast.literal_eval(said.value))
            for named, said in pairwise(one.body)
            if isinstance(named, ast.AnnAssign) and isinstance(said, ast.Expr)
        }
        for one in ast.parse(getsource(sys.modules[module])).body
        if isinstance(one, ast.ClassDef)
    }


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Iterate over the keys of a recipe, the sections among them; entries of a list are NAME."""
    for name, field in explained(model).items():
        yield prefix + name, field
        if section := section_of(field):
            yield from fields_of(section, f"{prefix}{name}.")
        elif get_origin(field.annotation) is tuple and (
            entry := _model_in(get_args(field.annotation)[0])
        ):
            yield from fields_of(entry, f"{prefix}{name}.NAME.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a key is; None if it has a value."""
    return _model_in(field.annotation)


def _model_in(kind: object) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def explain(error: ValidationError, kind: type[Section]) -> str:
    """Say what is wrong with a recipe, and with which key; the value, unless it is a secret."""
    lines: list[str] = []
    known = [key for key, _ in fields_of(kind)]
    for mistake in error.errors():
        key, given = ".".join(map(str, mistake["loc"])), mistake["input"]
        place = f"recipe.{key}".removesuffix(".")
        unknown = mistake["type"] == "extra_forbidden"
        near = (instead_of(key) or did_you_mean_key(key, known)) if unknown else ""
        shown = "" if isinstance(given, Mapping | BaseModel) else f" (got {quote(given, place)})"
        lines.append(f"{place}: {mistake['msg'].removeprefix('Value error, ')}{shown}{near}")
    return "; ".join(lines)
