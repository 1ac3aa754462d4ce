"""docs/frameworks.md, played: each of its snippets, as its table says."""

import ast
import asyncio
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.programs.residents import kill_programs
from ratchet.adapters.rendering.chat import Chat
from tests.support.door.recording_sampler import RecordedRollouts, Sampled, rollout_names, seed
from tests.support.door.stand_in import END, TOKENIZER, StandIn, letters, tool_call
from tests.support.door.token_identity import differences

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
RESIDENT_NODE = re.findall(
    r"^```js\n(import \{ createInterface .*?)^```$",
    (ROOT / "docs" / "agents.md").read_text(encoding="utf-8"),
    re.M | re.S,
)[0]
RESIDENT = ROOT / "agents" / "resident.py"
ENVIRONMENTS = ROOT / ".frameworks"
REQUIREMENTS = ROOT / "tests" / "support" / "frameworks"
GLUE = re.compile("base_?url|api_?key", re.I)
CHAT = Chat(TOKENIZER, context=100_000)
"""The prompts of some frameworks are longer than the tiny model's context."""

EXAMPLE = {"questions": ["What is in the box?", "What does it say?"], "answer": "meow"}

Lines = Sequence[list[int]]
"""What the policy says, call by call."""


def say(text: str) -> list[int]:
    return [*letters(text), END]


LOOK = tool_call("look", '{"at":  "the box"}')
SEEN, MEOW = say("A cat is in the box."), say("It says meow.")
LOOKS: Lines = (LOOK, SEEN, MEOW)
FINDINGS: Lines = (
    say('{"thing":  "a cat", "asleep": true}'),
    say('{"thing": "meow",  "asleep": false}'),
)
FINAL_ANSWERS: Lines = (
    LOOK,
    tool_call("final_answer", '{"answer":  "a cat"}'),
    tool_call("final_answer", '{"answer":  "meow"}'),
)


def fields(**of: str) -> list[int]:
    """Write fields as DSPy has them written."""
    said = [f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in of.items()]
    return say("".join(said) + "[[ ## completed ## ]]")


FINISH = fields(next_thought="I know.", next_tool_name="finish", next_tool_args="{}")
FIELDS: Lines = (
    fields(next_thought="I look.", next_tool_name="look", next_tool_args='{"at": "the box"}'),
    FINISH,
    fields(reasoning="I looked.", answer="a cat"),
    FINISH,
    fields(reasoning="I know cats.", answer="meow"),
)
SAID = {"instructor": FINDINGS, "smolagents": FINAL_ANSWERS, "DSPy": FIELDS}
"""Framework → what the policy says to it, where that is not `LOOKS`."""


@dataclass(frozen=True)
class Row:
    """A row of the page's table, and the snippet of its section."""

    framework: str
    version: str
    glue: int
    first_prompt: int
    kept: str
    own: str
    file: str
    snippet: str

    @property
    def agent(self) -> str:
        """The recipe's key, as the page says."""
        if self.file.endswith(".sh"):
            return f"command:sh {self.file}"
        if self.file.endswith(".mjs"):
            return f"resident:node {self.file}"
        module = Path(self.file).stem
        python = f".frameworks/{self.own}/bin/python"
        return f"resident:{python} agents/resident.py {module}" if self.own else module

    @property
    def environment(self) -> Path | None:
        """The folder of the framework's own environment; None if it lives beside Ratchet."""
        if self.framework == "Vercel AI SDK":
            return ENVIRONMENTS / "node"
        return ENVIRONMENTS / self.own if self.own else None

    @property
    def program(self) -> str:
        """The text of the agent's file."""
        first, rest = RESIDENT_NODE.split("\n", 1)
        ends = f"{first}\n{self.snippet}\n{rest[rest.index('const playing') :]}"
        return ends if self.file.endswith(".mjs") else self.snippet

    def skip_unless_installed(self) -> None:
        if self.environment is None and self.file.endswith(".py"):
            pytest.importorskip(self.version.split()[0], reason="it is not installed: make setup")
        if self.environment is not None and not (self.environment / ".ready").exists():
            pytest.skip(f"there is no {self.environment}; `make frameworks` makes it")
        for program in {"curl": ("curl", "jq"), "Vercel AI SDK": ("node",)}.get(self.framework, ()):
            if shutil.which(program) is None:
                pytest.skip(f"there is no {program}")


def rows() -> Iterator[Row]:
    table = re.findall(r"^\| \[(.*?)\]\(.*?\) \| (.*) \|$", PAGE, re.M)
    for framework, cells in table:
        version, glue, first_prompt, kept, environment = cells.split(" | ")
        section = PAGE.split(f"\n### {framework}\n")[1].split("\n### ")[0]
        file = re.findall(r"`(agents/\w+\.\w+)`:", section)[0]
        (snippet,) = re.findall(r"^```\w+\n(.*?)^```$", section, re.M | re.S)
        own = environment.split("`")[1] if "`" in environment else ""
        yield Row(framework, version, int(glue), int(first_prompt), kept, own, file, snippet)


ROWS = [*rows()]
every_row = pytest.mark.parametrize("row", ROWS, ids=[row.framework for row in ROWS])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project's folder with the page's snippets, `resident.py` and the environments."""
    (tmp_path / "agents").mkdir()
    for row in ROWS:
        (tmp_path / row.file).write_text(row.program)
    (tmp_path / "agents" / "resident.py").write_bytes(RESIDENT.read_bytes())
    (tmp_path / ".frameworks").symlink_to(ENVIRONMENTS)
    (tmp_path / "node_modules").symlink_to(ENVIRONMENTS / "node" / "node_modules")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    kill_programs()


def play(row: Row, folder: Path) -> tuple[RecordedRollouts, list[Sampled]]:
    """Play a row's agent once; return what was recorded of it, and its calls in their order."""
    [name] = rollout_names(1)
    lines = SAID.get(row.framework, LOOKS)
    said = {seed(name, call): line for call, line in enumerate(lines)}
    rewards = []

    def run_agent(batch: Batch, rollouts: Sequence[str]) -> None:
        agent = load_agent(row.agent)
        rewards.append(asyncio.run(agent(EXAMPLE, batch.endpoints(rollouts[0]))).value)

    sampler = StandIn(lambda _, params, __: said[params.seed or 0])
    played = RecordedRollouts(folder / "run", 1, sampler, CHAT, run_agent)
    assert rewards == [1.0]
    calls = [call for _, call in sorted(played.calls[name].items())]
    assert [call.tokens for call in calls] == [*lines]
    return played, calls


def kept_turns(calls: Sequence[Sampled]) -> list[bool]:
    """Tell for each call but the first whether its prompt begins with the tokens before it."""
    turns = [([*before.prompt, *before.tokens], call.prompt) for before, call in pairwise(calls)]
    return [prompt[: len(said)] == said for said, prompt in turns]


@every_row
def test_the_snippet_plays_and_keeps_what_the_table_says(row: Row, project: Path) -> None:
    row.skip_unless_installed()
    played, calls = play(row, project)
    assert differences(played.trajectories, played.calls) == []
    kept = kept_turns(calls)
    measured = f"{sum(kept)} of {len(kept)}", len(calls[0].prompt)
    assert measured == (row.kept, row.first_prompt), kept


@every_row
def test_the_table_has_the_version_that_is_installed(row: Row) -> None:
    pins = [*REQUIREMENTS.glob("*.txt")] if row.environment else [ROOT / "constraints.txt"]
    name, version = row.version.split(" ", 1)
    if row.framework == "Vercel AI SDK":
        pinned = json.loads((REQUIREMENTS / "package.json").read_text())["dependencies"][name]
        assert version == pinned
    elif row.framework != "curl":
        pinned = "".join(file.read_text() for file in pins)
        assert re.search(rf"^{name}(\[.*\])?=={re.escape(version)}$", pinned, re.M)


@every_row
def test_the_table_counts_the_lines_that_name_the_address_or_the_key(row: Row) -> None:
    assert row.glue == (
        python_glue(row.snippet) if row.file.endswith(".py") else other_glue(row.snippet)
    )


def python_glue(snippet: str) -> int:
    """Count the lines of the innermost statements of a snippet that name an address or a key."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.AsyncFunctionDef):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            own = range(node.lineno, last + 1)
            if any(GLUE.search(snippet.splitlines()[line - 1]) for line in own):
                lines |= {*own}
    return len(lines)


def other_glue(snippet: str) -> int:
    """Count the lines that name an address or a key, but for the line of the function `play`."""
    return sum(bool(GLUE.search(line)) for line in snippet.splitlines() if "play(" not in line)
