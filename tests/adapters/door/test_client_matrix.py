"""Unmodified clients against the engine: what is trained is what was sampled."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import tinker
from tinker import ModelInput, SampleResponse, SamplingParams

from ratchet.adapters.calls import POLICY
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import ROLE
from ratchet.adapters.rendering.chat import Chat
from tests.support.door.recording_sampler import RecordedRollouts, rollout_names, seed
from tests.support.door.stand_in import END, TINY, TOKENIZER, StandIn, letters, tool_call
from tests.support.door.token_identity import Reuse, differences, reuse
from tests.support.servers.engine_server import connected, serving

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "support" / "clients"
CHAT = Chat(TOKENIZER)

CALL = tool_call("look", '{"at":  "the box"}')
SEEN = [*letters("A cat is in the box."), END]
GUESS = [*letters('{"number":  7, "why": "luck"}'), END]
ACTION = 'Thought: I look.\nAction: look\nAction Input: {"at": "the box"}'
ANSWER = [*letters("Thought: I know.\nFinal Answer: a cat"), END]

Lines = Sequence[list[int]]
TALK: Lines = ()
"""Three questions, which the engine answers."""

LOOKS: Lines = (CALL, CALL, SEEN)
GUESSES: Lines = (GUESS, GUESS, GUESS)


@dataclass(frozen=True, slots=True)
class Client:
    """A program of `support/clients`, and what the policy says, call by call, in each of its ways.

    The program is run `by` an interpreter, and `uses` another program. In the ways in `ended` the
    client writes on into an answer that the model had ended, so that a new trajectory begins. One
    whose library is `slow` to import plays in a story.
    """

    program: str
    ways: dict[str, Lines]
    by: str = sys.executable
    uses: str = sys.executable
    ended: frozenset[str] = frozenset()
    slow: bool = False

    @property
    def command(self) -> list[str]:
        for needed in (self.by, self.uses):
            if shutil.which(needed) is None:
                pytest.skip(f"there is no {needed}; `make frameworks` installs what pip can")
        return [self.by, str(PROGRAMS / self.program)]


def python_of(framework: str) -> str:
    """Return the Python of a framework's environment, which `make frameworks` makes."""
    return str(ROOT / ".frameworks" / framework / "bin" / "python")


CLIENTS = (
    Client(
        "openai_client.py",
        {
            "sync": TALK,
            "asynchronous": TALK,
            "stream": TALK,
            "parse": GUESSES,
            "tools": LOOKS,
            "tools_streamed": LOOKS,
            "responses": TALK,
            "responses_streamed": TALK,
        },
    ),
    Client("curl.py", {"curl": TALK}, uses="curl"),
    Client("node_fetch.mjs", {"whole": TALK, "streamed": TALK}, by="node"),
    Client(
        "litellm_client.py",
        {"sync": TALK, "asynchronous": TALK, "stream": TALK, "tools": LOOKS},
        slow=True,
    ),
    Client(
        "crewai_client.py",
        {
            "call": TALK,
            "streaming": TALK,
            "structured": GUESSES,
            "native_tools": LOOKS,
            "react": ([*letters(f"{ACTION}\nObservation:")], ANSWER),
            "react_without_stop": ([*letters(ACTION), END], ANSWER),
        },
        ended=frozenset({"react_without_stop"}),
        slow=True,
    ),
    Client(
        "langchain_client.py",
        {"invoke": TALK, "stream": TALK, "tools": LOOKS, "structured": GUESSES},
        by=python_of("langgraph"),
    ),
    Client(
        "agents_sdk.py",
        {
            "completions": TALK,
            "completions_streamed": TALK,
            "completions_tools": LOOKS,
            "completions_structured": GUESSES,
            "responses": TALK,
            "responses_streamed": TALK,
            "responses_tools": LOOKS,
            "responses_structured": GUESSES,
        },
        by=python_of("openai-agents"),
    ),
    Client(
        "anthropic_client.py",
        {
            "sync": TALK,
            "asynchronous": TALK,
            "stream": TALK,
            "tools": LOOKS,
            "tools_streamed": LOOKS,
        },
    ),
)


class Prompted:
    """Sampler that says the line of a call, by the call's seed, and asks the engine if none is."""

    def __init__(self, engine: tinker.SamplingClient, lines: dict[int, list[int]]) -> None:
        self._engine, self._lines = engine, lines

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        line = self._lines.get(sampling_params.seed or 0)
        by = self._engine if line is None else StandIn(lambda *_: line)
        return await by.sample(prompt, num_samples, sampling_params)


def play(client: Client, engine: tinker.SamplingClient, folder: Path) -> RecordedRollouts:
    """Play every way of a client as a rollout, in the order of the ways."""
    ways = dict(zip(rollout_names(len(client.ways)), client.ways, strict=True))
    lines = {
        seed(rollout, call): line
        for rollout, way in ways.items()
        for call, line in enumerate(client.ways[way])
    }

    def run_program(batch: Batch, rollouts: Sequence[str]) -> None:
        given = [(ways[name], batch.url(ROLE, name), batch.key(name)) for name in rollouts]
        program = subprocess.run(
            [*client.command, *chain.from_iterable(given)],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert program.returncode == 0, program.stdout[-8000:]

    return RecordedRollouts(folder, len(ways), Prompted(engine, lines), CHAT, run_program)


def environment(home: Path) -> dict[str, str]:
    """Return a program's environment: the folder it may write to, and the model it asks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    own = {"HOME": str(home), "TMPDIR": str(home), "OPENAI_MODEL": POLICY}
    return kept | own


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.SamplingClient]:
    with serving(TINY, tmp_path_factory.mktemp("state")) as address, connected(address) as service:
        yield service.create_sampling_client(base_model=str(TINY)).result()


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(client, id=client.program, marks=[pytest.mark.story] * client.slow)
        for client in CLIENTS
    ],
)
def test_what_a_client_was_answered_is_what_is_trained(
    client: Client, engine: tinker.SamplingClient, tmp_path: Path
) -> None:
    played = play(client, engine, tmp_path)
    expected = {way: len(lines) or 3 for way, lines in client.ways.items()}
    assert [*map(len, played.calls.values())] == [*expected.values()], expected
    assert differences(played.trajectories, played.calls) == []
    turns = sum(count - 1 for way, count in expected.items() if way not in client.ended)
    assert reuse(played.spans) == Reuse(turns, turns)
