"""Servers of OpenAI's API that score what others have sampled, and those that cannot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.clients.scoring_server import CannotScore, ScoringServer, speaks_openai
from ratchet.adapters.errors import PassingError
from tests.support.servers.engine_server import TINY, tiny_chat_service
from tests.support.servers.plain_server import PlainServer, plain_server

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
DRAW = np.random.default_rng(0)
TEXTS = [DRAW.integers(3, 1500, length).tolist() for length in (2, 9, 40)]
LAST = [1, 4, 39]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    with (
        tiny_chat_service(tmp_path_factory.mktemp("state")) as service,
        plain_server(service.base_sampler(str(TINY)), TOKENIZER) as plain,
    ):
        yield plain


@pytest.fixture
def plain(served: PlainServer) -> Iterator[PlainServer]:
    yield served
    served.fault = served.refusal = None
    served.models = PlainServer.models
    served.asked.clear()


@pytest.fixture
def scoring(plain: PlainServer) -> ScoringServer:
    return ScoringServer(plain.model, 60)


def test_a_plain_server_scores_as_its_model_does(
    plain: PlainServer, scoring: ScoringServer
) -> None:
    own = plain.sampler.score(TEXTS, LAST)
    for mine, theirs in zip(scoring.score(TEXTS, LAST), own, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_plain_server_has_the_likeliest_tokens_of_its_model(
    plain: PlainServer, scoring: ScoringServer
) -> None:
    own = plain.sampler.score_likeliest(TEXTS, LAST, 5)
    for mine, theirs in zip(scoring.score_likeliest(TEXTS, LAST, 5), own, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_token_that_is_never_sampled_has_no_finite_log_probability(
    plain: PlainServer, scoring: ScoringServer
) -> None:
    plain.fault = lambda places: [
        place and {token: {**told, "logprob": -9999.0} for token, told in place.items()}
        for place in places or []
    ]
    [scores] = scoring.score(TEXTS[:1], [1])
    assert scores.tolist() == [float("-inf")]


def changed(**told: Any) -> Callable[[Any], Any]:
    """Return a fault: each token of each place is told otherwise."""

    def fault(places: list[Any]) -> list[Any]:
        return [
            place and {token: {**one, **told} for token, one in place.items()} for place in places
        ]

    return fault


def renamed(name: str) -> Callable[[Any], Any]:
    """Return a fault: the first token of each place has another id."""

    def fault(places: list[Any]) -> list[Any]:
        return [place and {name: next(iter(place.values())), **place} for place in places]

    return fault


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda _: None, "gives no log-probabilities of a prompt .*; give a server that honours"),
        (lambda places: places[1:], "scores 1 tokens instead of 2; use one that honours"),
        (lambda _: [], "gives no log-probabilities of a prompt that can be read"),
        (lambda places: [None, *({} for _ in places[1:])], "no log-probability of the prompt's ow"),
        (
            lambda places: [None, {"1": places[1]["1"]}],
            "gives 1 tokens at a place instead of 2; as",
        ),
        (changed(logprob=-0.1), r"their sum at a place is [12]\.\d+; start vLLM with --logprobs-m"),
        (changed(logprob=0.7), "0.7 is no log-probability of token"),
        (changed(logprob=False), "False is no log-probability"),
        (changed(logprob=None), "None is no log-probability"),
        (changed(logprob="-1"), "-1 is no log-probability"),
        (changed(logprob=float("nan")), "nan is no log-probability"),
        (changed(logprob=-(10**400)), "that can be read .*too large"),
        (renamed("-5"), "'-5' is no token"),
        (renamed("01"), "'01' is no token"),
        (renamed("9" * 30), "'99999999999999999999' is no token"),
        (lambda places: [None, *(["x"] for _ in places[1:])], "that can be read"),
        (lambda places: [None, *({"x": {}} for _ in places[1:])], "that can be read"),
    ],
)
def test_a_server_that_scores_otherwise_is_refused(
    plain: PlainServer, scoring: ScoringServer, fault: Callable[[Any], Any], said: str
) -> None:
    plain.fault = fault
    with pytest.raises(CannotScore, match=said) as refused:
        scoring.check(2)
    assert f"the server of {plain.model}" in str(refused.value)


@pytest.mark.parametrize(
    ("refusal", "kind", "said"),
    [
        ((401, "Incorrect key: none"), CannotScore, "its key; set RATCHET_TEACHER_KEY"),
        ((400, "out of vocabulary"), CannotScore, "refuses to score a prompt: out of vocabulary$"),
        ((404, "Not Found."), CannotScore, "Not Found; mend the model's name, or the URL, which"),
        ((400, "x" * 9999), CannotScore, "a prompt: x{300}$"),
        ((429, "slow down"), PassingError, "a prompt: slow down; start the same run again"),
        ((503, "is loading"), PassingError, "refuses to score a prompt: is loading; start the sa"),
    ],
)
def test_a_refusal_says_whether_it_may_pass(
    plain: PlainServer, refusal: tuple[int, str], kind: type[Exception], said: str
) -> None:
    plain.refusal = refusal
    with pytest.raises(kind, match=said):
        ScoringServer(plain.model, 60).check(0)


def test_a_server_that_is_away_may_come_back(plain: PlainServer) -> None:
    with pytest.raises(PassingError, match=r"asked: ConnectError: .*; start the same run"):
        ScoringServer("http://127.0.0.1:9/v1#some/model", 60).check(0)


def test_more_likeliest_tokens_than_the_server_allows_are_refused(scoring: ScoringServer) -> None:
    with pytest.raises(CannotScore, match="allowed: 20; ask for fewer than 21, or start vLLM with"):
        scoring.score_likeliest(TEXTS, LAST, 21)


def test_a_server_shares_the_tokens_of_its_own_tokenizer_alone(
    plain: PlainServer, scoring: ScoringServer, tiny_model: Path
) -> None:
    assert scoring.shares(TOKENIZER)
    assert not scoring.shares(AutoTokenizer.from_pretrained(tiny_model))
    plain.refusal = (400, "Token id 99999 is out of vocabulary")
    assert not scoring.shares(TOKENIZER)
    plain.refusal = (400, "This model's maximum context length is 8 tokens")
    with pytest.raises(CannotScore, match="maximum context length is 8 tokens"):
        scoring.shares(TOKENIZER)


def test_added_tokens_are_compared(plain: PlainServer, scoring: ScoringServer) -> None:
    added = TOKENIZER.get_added_vocab().values()
    for token in (min(added), max(added)):

        def other(places: Any, own: str = str(token)) -> Any:
            return [
                place and {k: {**v, "decoded_token": "<x>"} if k == own else v for k, v in place}
                for place in [place and [*place.items()] for place in places]
            ]

        plain.fault = other
        assert not scoring.shares(TOKENIZER), f"the text of token {token} differs"


def test_a_plain_server_gets_the_teachers_key_and_nothing_of_openai_s(
    plain: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "RATCHET_SERVER_KEY"):
        monkeypatch.setenv(name, "of-others")
    monkeypatch.setenv("RATCHET_TEACHER_KEY", "of-teachers")
    assert speaks_openai(f"{plain.url}/v1")
    ScoringServer(plain.model, 60).check(0)
    assert [headers["authorization"] for headers in plain.asked] == ["Bearer of-teachers"] * 2
    assert "of-others" not in str(plain.asked)


@pytest.mark.parametrize(
    ("models", "known"),
    [
        ((401, {"error": "Unauthorized"}), True),
        ((403, {"error": {"message": "no"}}), True),
        ((404, {"error": "no"}), False),
        ((404, {"detail": "Not Found"}), False),
        ((200, None), False),
        ((200, [{}]), False),
        ((200, 5), False),
    ],
)
def test_a_server_is_known_by_its_list_of_models(
    plain: PlainServer, models: tuple[int, Any], known: bool
) -> None:
    plain.models = models
    assert speaks_openai(f"{plain.url}/v1") == known


def test_a_server_that_does_not_answer_now_is_a_passing_fault(plain: PlainServer) -> None:
    plain.models = (503, {"error": "is loading"})
    with pytest.raises(PassingError, match=r"does not answer \(503\); start the same run again"):
        speaks_openai(f"{plain.url}/v1")
    with pytest.raises(PassingError, match=r"does not answer \(ConnectError"):
        speaks_openai("http://127.0.0.1:9/v1")
