"""`serve` answers any OpenAI client with a checkpoint, each call by itself."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from ratchet.adapters.calls import Sampling
from ratchet.adapters.door import door
from ratchet.adapters.door.door import choose_sampling
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.names import find_weights
from ratchet.flows.checkpoints.serving import open_weights, serve_model
from ratchet.flows.cli.commands import app
from ratchet.flows.opening.run import open_run
from tests.support.damages import delete_the_folder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.two_policies import two_policies
from tests.support.servers.engine_server import Address

ROOT = Path(__file__).parents[2]
ASK = [{"role": "user", "content": "You are a quiet otter. Who are you?"}]


pytestmark = pytest.mark.usefixtures("tiny_chat")


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny_chat: Address
) -> Iterator[dict[str, str]]:
    """The variables of a checkpoint's endpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(tmp_path_factory.mktemp("runs")))
        with open_run(small_recipe(), "one"):
            pass  # the run has its checkpoint 0
        with serve_model(find_weights("one@0")) as (endpoint, _):
            yield endpoint.variables()


@pytest.fixture
def client(served: dict[str, str]) -> Iterator[openai.OpenAI]:
    address, key = served["OPENAI_BASE_URL"], served["OPENAI_API_KEY"]
    with openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client:
        yield client


def said(client: openai.OpenAI, **fields: object) -> str | None:
    answer = client.chat.completions.create(model="any", messages=ASK, **fields)  # type: ignore
    return answer.choices[0].message.content


def test_a_checkpoint_is_served_by_its_name_at_a_plain_address(
    served: dict[str, str], client: openai.OpenAI
) -> None:
    assert served["OPENAI_BASE_URL"].endswith("/v1")
    assert [model.id for model in client.models.list()] == ["one@0"]
    assert served["OPENAI_MODEL"] == "one@0"


@pytest.mark.usefixtures("served")
def test_one_policy_of_several_is_served_by_its_name() -> None:
    with open_run(two_policies(), "several") as run:
        _, listener = run.policies
    listening = find_weights("several:listener@0")
    assert listening.name == find_weights("several:listener").name == "several:listener@0"
    with serve_model(listening) as (endpoint, _):
        assert endpoint.variables()["OPENAI_MODEL"] == "several:listener@0"
    with open_weights(listening) as (_, sampler):
        assert sampler.path == listener.ledger.at(0).sampler != run.ledger.at(0).sampler
    with pytest.raises(UserError, match="several trains no policy fox; it trains policy, li"):
        find_weights("several:fox")


@pytest.mark.usefixtures("served")
def test_a_damaged_checkpoint_is_made_again_to_be_served_or_exported(tiny_chat: Address) -> None:
    with open_run(small_recipe(), "hurt") as run:
        saved = run.ledger.at(0).sampler
    place = f"tensors/{saved.removeprefix('tinker://')}.*/adapter_model.safetensors"
    [weights] = tiny_chat.state.glob(place)
    whole = weights.read_bytes()
    delete_the_folder(weights)
    with open_weights(find_weights("hurt@0")) as (_, sampler):
        assert sampler.path == run.ledger.at(0).sampler != saved
    assert weights.read_bytes() == whole


def test_what_the_client_asks_for_is_how_it_is_sampled(client: openai.OpenAI) -> None:
    assert said(client, temperature=0) == said(client, temperature=0)
    assert said(client, seed=5) == said(client, seed=5)
    assert len({said(client) for _ in range(6)}) > 1
    assert said(client, seed=5, max_tokens=1) != said(client, seed=5, max_tokens=12)


def test_answers_have_ids_of_their_own(client: openai.OpenAI) -> None:
    ids = {client.chat.completions.create(model="m", messages=ASK, seed=1).id for _ in range(2)}  # type: ignore
    assert len(ids) == 2


def test_another_key_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        said(client.with_options(api_key="another"))


def test_a_failure_of_the_endpoint_is_told_with_its_cause_and_logged(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such weights")

    monkeypatch.setattr(door, "choose_sampling", fail)
    with pytest.raises(openai.InternalServerError, match="LookupError: no such weights"):
        said(client)
    assert "in fail" in caplog.text


def test_what_a_client_does_not_say_is_the_recipes() -> None:
    defaults = Sampling(max_tokens=16, temperature=0.7, top_p=1.0, top_k=-1)
    assert choose_sampling(None, {"temperature": None}, defaults) == defaults
    asked = choose_sampling(99, {"temperature": 0, "top_p": 0.5, "top_k": 3}, defaults)
    assert asked == Sampling(99, 0, 0.5, 3)


def test_the_command_serves_a_base_model_until_stdin_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, ["serve", "local/tiny-chat"], input="")
    assert printed.exit_code == 0, printed.output
    exported = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    assert exported["export OPENAI_MODEL"] == "local/tiny-chat"
    assert exported["export OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert len(exported["export OPENAI_API_KEY"]) >= 32
