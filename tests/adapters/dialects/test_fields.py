"""What becomes of each field of a request: honoured, harmless, or refused by its name."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import openai
import pytest
from anthropic.types.beta import message_create_params as anthropic_beta
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from ratchet.adapters.calls import Refused
from ratchet.adapters.clients.litellm import PASSED_FIELDS
from ratchet.adapters.dialects.fields import RULES, Api, Fate, rules_of
from ratchet.adapters.dialects.google_generate import GenerateContent
from ratchet.adapters.door.chat_api import DIALECTS
from tests.support.door.opened_door import ASK, Opened

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
CLIENTS = [
    (Api.CHAT, CompletionCreateParamsNonStreaming),
    (Api.RESPONSES, ResponseCreateParamsNonStreaming),
    (Api.MESSAGES, MessageCreateParamsNonStreaming),
    (Api.MESSAGES, MessageCountTokensParams),
    (Api.MESSAGES, anthropic_beta.MessageCreateParamsNonStreaming),
]
READERS: dict[Api, Any] = dict(zip(Api, [*DIALECTS.values(), GenerateContent("m")], strict=True))
REFUSED = [
    (api, name) for api in Api for name, r in rules_of(api).items() if r.fate is Fate.REFUSED
]


def nested(path: Sequence[str], value: object) -> tuple[str, object]:
    """Return the name and the value of the field of a body that has a value at a path."""
    first, *within = path
    return first, dict([nested(within, value)]) if within else value


def body(api: Api, **fields: Any) -> dict[str, Any]:
    fields = dict(nested(path.split("."), value) for path, value in fields.items())
    if api is Api.GOOGLE:
        return {"contents": [{"parts": [{"text": "hello"}]}], **fields}
    return {"model": "m", "input" if api is Api.RESPONSES else "messages": ASK, **fields}


@pytest.mark.parametrize(("api", "sent"), CLIENTS)
def test_every_field_of_the_installed_clients_has_a_rule(api: Api, sent: type) -> None:
    assert get_type_hints(sent).keys() - rules_of(api).keys() == set()


def test_a_field_has_one_rule() -> None:
    for api in Api:
        names = [name for rule in RULES if api in rule.apis for name in rule.names]
        assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(("api", "name"), REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_its_name(api: Api, name: str) -> None:
    with pytest.raises(Refused, match=rf"^{name} is ") as refused:
        READERS[api].read(body(api, **{name: {"5": -100}}))
    assert (refused.value.status, refused.value.param) == (400, name)
    for nothing in (None, *rules_of(api)[name].unless):
        assert READERS[api].read(body(api, **{name: nothing}))


@pytest.mark.parametrize("api", Api)
def test_a_field_that_nobody_knows_is_refused_by_its_name(api: Api) -> None:
    with pytest.raises(Refused, match=f"odd is no field of {api} that is known here") as refused:
        READERS[api].read(body(api, odd=0))
    assert (refused.value.status, refused.value.param) == (400, "odd")
    assert READERS[api].read(body(api, odd=None)).fields["odd"] is None


def test_false_is_not_taken_for_the_number_that_asks_for_nothing() -> None:
    assert READERS[Api.CHAT].read(body(Api.CHAT, min_p=0.0))
    with pytest.raises(Refused, match="min_p is not honoured here: no sampler"):
        READERS[Api.CHAT].read(body(Api.CHAT, min_p=False))


@pytest.mark.parametrize("value", [-2, True, 2.5, "5"])
def test_a_top_k_that_is_none_is_refused(value: object) -> None:
    for api in (Api.CHAT, Api.RESPONSES, Api.MESSAGES):
        with pytest.raises(Refused, match="top_k is "):
            READERS[api].read(body(api, top_k=value))


def test_a_role_that_a_model_behind_litellm_answers_takes_what_litellm_passes_on() -> None:
    asked = READERS[Api.CHAT].read(body(Api.CHAT, logit_bias={"5": -100}), PASSED_FIELDS)
    assert asked.fields["logit_bias"] == {"5": -100}
    efforts = body(Api.CHAT, reasoning_effort="high", verbosity="low")
    assert READERS[Api.CHAT].read(efforts, PASSED_FIELDS).hints == ["verbosity"]
    with pytest.raises(Refused, match="guided_json"):
        READERS[Api.CHAT].read(body(Api.CHAT, guided_json={}), PASSED_FIELDS)


def test_a_refused_field_is_told_to_the_client_and_is_no_call(opened: Opened) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias is not honoured here"):
        opened.ask(logit_bias={"5": -100})
    opened.ask(extra_body={"top_k": 20})
    assert [span.id.number for span in opened.spans] == [0]


def write_table() -> Iterator[str]:
    """Write the rules of the fields that change an answer, as a table of Markdown."""
    yield "| field | of | what becomes of it |"
    yield "|---|---|---|"
    for rule in (rule for rule in RULES if rule.fate not in {Fate.REFUSED, Fate.HARMLESS}):
        names = ", ".join(f"`{name}`" for name in rule.names)
        others = [api for api in Api if api not in rule.apis]
        apis = ", ".join(rule.apis) if others[1:] else f"all but {others[0]}" if others else "all"
        told = rule.why if rule.fate is Fate.SAMPLING else f"{rule.fate}: {rule.why}"
        yield f"| {names} | {apis} | {told} |"


def test_the_page_has_the_table_of_the_code() -> None:
    assert "\n".join(write_table()) in PAGE.read_text(encoding="utf-8")
