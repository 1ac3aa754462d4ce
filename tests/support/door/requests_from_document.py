"""The OpenAPI document of the door, and requests that it allows, and that it forbids."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import FailureGroup
from schemathesis.openapi import from_dict
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from ratchet.adapters.dialects.fields import Api, Fate, rules_of
from ratchet.adapters.yaml_text import read_yaml

PARTS = ("frame", "openai_chat", "openai_responses", "anthropic_messages", "google_generate")
BODIES = {
    "ChatRequest": Api.CHAT,
    "ResponsesRequest": Api.RESPONSES,
    "MessagesRequest": Api.MESSAGES,
    "GenerateRequest": Api.GOOGLE,
}
"""The schema of each API's bodies."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def _join(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join two documents and the objects in them, which may have no value of one name."""
    joined = {**one, **other}
    for name in one.keys() & other.keys():
        joined[name] = _join(one[name], other[name])
    return joined


def _others(api: Api) -> dict[str, Any]:
    """Describe the fields that are not honoured: the harmless ones, and those that are refused."""
    fields: dict[str, Any] = {}
    for name, rule in rules_of(api).items():
        if rule.fate is Fate.HARMLESS:
            fields[name] = {}
        elif rule.fate is Fate.REFUSED:
            fields[name] = {"enum": [None, *rule.unless]}
    return {"properties": fields, "additionalProperties": {"type": "null"}}


def _read_document() -> dict[str, Any]:
    folder = Path(__file__).with_name("document")
    parts = [read_yaml((folder / f"{part}.yaml").read_text(encoding="utf-8")) for part in PARTS]
    others = {name: _others(api) for name, api in BODIES.items()}
    return reduce(_join, [*parts, {"components": {"schemas": others}}])


DOCUMENT: dict[str, Any] = _read_document()
"""The requests and answers that the door reads and writes, below a base URL."""


def operations() -> list[APIOperation]:
    """List the operations of the document; the sender adds the key."""
    config = SchemathesisConfig()
    config.projects.default.generation.update(with_security_parameters=False)
    schema = from_dict(DOCUMENT, config=config)
    schema.validate()
    return [schema[path][method] for path, item in DOCUMENT["paths"].items() for method in item]


def drawn(many: int) -> list[Case]:
    """Draw `many` cases, always the same; of each operation with a body, half must be refused."""
    posts = [one for one in operations() if one.method == "post"]
    kinds = [(one, mode) for one in posts for mode in GenerationMode]
    cases: list[Case] = []
    for index, (operation, mode) in enumerate(kinds):
        _draw(operation, mode, (many + index) // len(kinds), cases)
    return cases


def _draw(operation: APIOperation, mode: GenerationMode, many: int, cases: list[Case]) -> None:
    @seed(many)
    @settings(
        max_examples=many,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    @given(operation.as_strategy(mode))
    def keep(case: Case) -> None:
        cases.append(case)

    keep()


def written(case: Case, url: str, headers: Mapping[str, str]) -> httpx.Request:
    """Return the request as it goes over the wire to the base URL."""
    fields = case.as_transport_kwargs(base_url=url, headers=dict(headers))
    prepared = requests.Request(**fields).prepare()
    raw = [(name.encode(), _bytes(value)) for name, value in prepared.headers.items()]
    return httpx.Request(
        prepared.method or "", prepared.url or "", headers=raw, content=_bytes(prepared.body)
    )


def complaint(case: Case, response: httpx.Response) -> str:
    """Say how the response differs from the document; empty if it does not."""
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as failures:
        return "; ".join(str(failure) for failure in failures.exceptions)
    return ""


def _bytes(value: Any) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else value or b""
