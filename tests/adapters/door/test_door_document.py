"""The door's OpenAPI document."""

from typing import cast

import httpx
from fastapi.routing import APIRoute
from schemathesis.specs.openapi.checks import ignored_auth, unsupported_method

from tests.support.door.door_batches import bearer
from tests.support.door.opened_door import ASK, TOKENS, TOOLS, Opened
from tests.support.door.requests_from_document import CHECKS, operations

BODIES = {
    "/chat/completions": {
        "model": "m",
        "messages": ASK,
        "tools": TOOLS,
        "logprobs": True,
        **TOKENS,
    },
    "/responses": {"model": "m", "input": ASK, "include": ["message.output_text.logprobs"]},
    "/messages": {"model": "m", "messages": ASK, "max_tokens": 9},
    "/messages/count_tokens": {"model": "m", "messages": ASK},
}


def described(opened: Opened, below: str = "") -> dict:
    url = f"{opened.url}{below}/openapi.json"
    return httpx.get(url, headers=bearer(opened.key), timeout=None).raise_for_status().json()


def test_it_stands_beside_every_base_url_and_names_it_as_its_server(opened: Opened) -> None:
    document, below = described(opened), described(opened, "/v1")
    assert [opened.url.endswith(server["url"]) for server in document["servers"]] == [True]
    assert below == document | {"servers": [{"url": document["servers"][0]["url"] + "/v1"}]}


def test_nobody_without_the_key_may_read_it(opened: Opened) -> None:
    assert httpx.get(f"{opened.url}/openapi.json", timeout=None).status_code == 401


def test_all_that_the_door_answers_is_in_it(opened: Opened) -> None:
    routes = cast(list[APIRoute], opened.door._app().routes)
    served = {
        (route.path.removeprefix(opened.door.prefix).removeprefix("/v1"), method.lower())
        for route in routes
        for method in route.methods or ()
    }
    paths = described(opened)["paths"]
    assert served == {(path, method) for path, item in paths.items() for method in item}


def test_each_operation_answers_as_it_says_and_only_with_the_key(opened: Opened) -> None:
    opened.say("It is an *x*.<|im_end|>")
    headers = {"Authorization": f"Bearer {opened.key}"}
    for operation in operations(described(opened)):
        case = operation.Case()
        if operation.method == "post":
            case = operation.Case(body=BODIES[operation.path], media_type="application/json")
        checks = [*CHECKS, ignored_auth, unsupported_method]
        response = case.call_and_validate(base_url=opened.url, headers=headers, checks=checks)
        assert response.status_code == 200, operation.label
