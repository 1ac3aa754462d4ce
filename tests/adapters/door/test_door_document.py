"""The door, by the OpenAPI document that its requests are drawn from."""

import re
from typing import cast

from schemathesis.specs.openapi.checks import ignored_auth, unsupported_method
from starlette.routing import Route

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.chat_api import GOOGLE
from tests.support.door.opened_door import ASK, TOKENS, TOOLS, Opened
from tests.support.door.requests_from_document import CHECKS, DOCUMENT, operations

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
GENERATED = {"contents": [{"parts": [{"text": "hello"}]}]}
PARAMETERS = {"/models/{name}": {"name": POLICY}}


def test_all_that_the_door_answers_is_in_it(opened: Opened) -> None:
    routes = cast(list[Route], opened.door._app().routes)
    served = {
        (
            re.sub("^/v1(beta)?(?=/)", "", route.path.removeprefix(opened.door.prefix)),
            method.lower(),
        )
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}  # it is answered wherever GET is
    }
    paths = DOCUMENT["paths"].items()
    assert served == {(path, method) for path, item in paths for method in item}


def test_each_operation_answers_as_it_says_and_only_with_the_key(opened: Opened) -> None:
    opened.say("It is an *x*.<|im_end|>")
    headers = {"Authorization": f"Bearer {opened.key}"}
    for operation in operations():
        of_google = operation.path.startswith(f"{GOOGLE}/{{model}}")
        named = {"model": "m"} if of_google else PARAMETERS.get(operation.path, {})
        query = {"alt": "sse"} if operation.path.endswith(":streamGenerateContent") else {}
        body = {"body": GENERATED if of_google else BODIES.get(operation.path)}
        sent = {**body, "media_type": "application/json"} if operation.method == "post" else {}
        case = operation.Case(path_parameters=named, query=query, **sent)
        checks = [*CHECKS, ignored_auth, unsupported_method]
        response = case.call_and_validate(base_url=opened.url, headers=headers, checks=checks)
        assert response.status_code == 200, operation.label
