"""Secrets stay out of refusals, and of what trackers and cards are told."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.errors import UserError
from ratchet.adapters.player_protocol import LONGEST_MESSAGE, Failure
from ratchet.adapters.redaction import public
from ratchet.adapters.yaml_text import read_yaml
from ratchet.flows.recipe.loading import changed_recipe, recipe_options
from ratchet.tasks.storage.dotted_keys import merge_values, nest_value
from tests.support.processes import ROOT

DEPLOYMENTS = read_yaml((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
HELLO = next(one for one in DEPLOYMENTS if one["name"] == "hello")["parameters"]["recipe"]
KEYS = (
    *re.findall(r"^ {0,2}([a-z][\w.]*)[: ]", recipe_options(), re.M),
    *("flow", "api_key", "rollouts.token", "roles.judge", "judge.criteria"),
)


def test_secrets_are_left_out_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    config = {
        "rollouts": {"max_tokens": 64, "api_key": "a", "judge_token": "b"},
        "judge.password": "c",
        "note": "sk-12345",
        "agent": "python play.py --key sk-12345",
        "columns": ["question", "sk-12345"],
        "cluster": "tls://me:hush@host:8786",
        "path": "abc.csv",
        "seed": 0,
    }
    kept = {"rollouts": {"max_tokens": 64}, "path": "abc.csv", "seed": 0}
    assert public(config) == kept


SECRETS = (
    "sk-proj-0123456789abcdefghij",
    "hf_AbCdEfGhIjKlMnOpQrSt",
    "tml-0123456789abcdef0123456789abcdef",
    "https://me:pa55word@host/path",
    "of the environment",
)


@given(st.data())
def test_no_refusal_of_a_recipe_shows_a_secret_wherever_it_is_written(data: st.DataObject) -> None:
    secret = data.draw(st.sampled_from(SECRETS))
    shapes: list[Any] = [secret, [secret], {"x": secret}, {secret: 1}, [[secret], 1]]
    key = data.draw(st.sampled_from(KEYS))
    value: Any = data.draw(st.sampled_from(shapes))
    given_by_set = [f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    for recipe, overrides in (
        (merge_values(HELLO, nest_value(key, value)), ()),
        (HELLO, given_by_set),
    ):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("JUDGE_API_KEY", "of the environment")
            try:
                changed_recipe(recipe, overrides)
            except UserError as refused:
                said = str(refused)
                assert secret not in said
                assert "pa55word" not in said


@pytest.mark.parametrize("key", ["api_key", "judge.password", "tracking.token", "rollouts.secret"])
def test_the_value_of_a_key_that_is_named_like_a_secret_is_not_quoted(key: str) -> None:
    with pytest.raises(UserError, match=key.rpartition(".")[2]) as refused:
        changed_recipe(merge_values(HELLO, nest_value(key, "hunter2")))
    assert "hunter2" not in str(refused.value)


def test_values_that_are_no_secrets_are_quoted_and_long_ones_cut() -> None:
    with pytest.raises(UserError, match=r"recipe\.steps: .* \(got 'many'\)"):
        changed_recipe({**HELLO, "steps": "many"})
    with pytest.raises(UserError, match=r"\(got 'm+…\)"):
        changed_recipe({**HELLO, "steps": "m" * 5000})


@pytest.mark.parametrize("variable", ["WANDB_API_KEY", "wandb_api_key", "TOKEN"])
def test_no_error_of_a_user_shows_a_secret_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0123-4567-89ab")
    for name in ("Bearer", "bearer", "BEARER"):
        error = UserError(f"https://me:pa55word@host refuses 0123-4567-89ab; {name} abcdef is bad")
        assert str(error) == f"https://***@host refuses ***; {name} *** is bad"
    assert str(UserError("get s3://b/k?X-Amz-Signature=ab12&part=3")) == "get s3://b/k?***&part=3"


def test_a_failure_s_message_shows_no_secret_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = "planted-password-0001"
    monkeypatch.setenv("DATABASE_PASSWORD", secret)
    for before in range(0, 2 * LONGEST_MESSAGE, 7):
        told = Failure("Error", f"{'-' * before}{secret}{'-' * LONGEST_MESSAGE}").message
        assert "planted" not in told
        assert "0001" not in told
