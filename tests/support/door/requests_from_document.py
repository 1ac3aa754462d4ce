"""Requests that the door's own document allows, and requests that it forbids."""

from collections.abc import Mapping
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

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def operations(document: dict[str, Any]) -> list[APIOperation]:
    """List the operations of the document; the sender adds the key."""
    config = SchemathesisConfig()
    config.projects.default.generation.update(with_security_parameters=False)
    schema = from_dict(document, config=config)
    schema.validate()
    return [schema[path][method] for path, item in document["paths"].items() for method in item]


def drawn(document: dict[str, Any], many: int) -> list[Case]:
    """Draw `many` cases, always the same; of each operation with a body, half must be refused."""
    posts = [one for one in operations(document) if one.method == "post"]
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
