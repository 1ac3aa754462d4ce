"""dryrun --say: a file plays a program through the real door, and no model is needed."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ratchet.adapters.tinker import engines
from ratchet.flows.cli.commands import app
from ratchet.tasks.storage.run_folder import folder_of
from ratchet.tasks.storage.tables import read_table

ROOT = Path(__file__).parents[3]
LOOKS = {"text": "I look.", "tools": [{"name": "look", "arguments": {"at": "the box"}}]}
DONE = {"text": "A cat."}

AGENT = """
from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def play(example: dict, *, base_url: str, model: str, api_key: str) -> float:
    messages = [{"role": "user", "content": "What is in the box?"}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            made = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            answer = made.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                return float("cat" in answer.content)
            FORGETS
            for call in answer.tool_calls:
                seen = {"role": "tool", "tool_call_id": call.id, "content": "There is a cat in it."}
                messages.append(seen)
"""

SILENT = """
async def play(example, *, base_url, api_key, model):
    return 1.0
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with the agent, and have no engine start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(engines, "_start", lambda: pytest.fail("an engine starts"))
    (tmp_path / "agents").mkdir()
    write_agent(tmp_path, "pass")
    for name in ("datasets", "prefect.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write_agent(project: Path, forgets: str) -> None:
    (project / "agents" / "looking.py").write_text(AGENT.replace("FORGETS", forgets))


def dry(project: Path, *turns: dict[str, Any], more: tuple[str, ...] = ()) -> tuple[int, str]:
    """Play the agent by a file of turns; return the status and what was printed."""
    file = project / "turns.jsonl"
    file.write_text("".join(f"{json.dumps(turn)}\n" for turn in turns))
    words = ["dryrun", "hello", "--set", "agent=looking", "--set", "rollouts.max_tokens=100"]
    said = CliRunner().invoke(app, [*words, "--say", str(file), *more])
    return said.exit_code, said.output


def part(report: str, title: str) -> str:
    return report.partition(f"# {title}\n\n")[2].partition("\n\n#")[0]


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_file_shows_that_a_program_will_train(project: Path) -> None:
    status, said = dry(project, LOOKS, DONE, more=("--keep",))
    assert status == 0, said
    table, *lines = part(said, "program").splitlines()[1:]
    assert table.split() == ["policy", "chat", "completions", "4", "0", *table.split()[-2:]]
    assert lines[0] == "the tools of policy: look"
    assert lines[1].startswith("local/tiny-chat takes 32,768 tokens, a prompt and its answer")
    assert lines[1].endswith("and has read texts of 2,048")
    assert lines[2:] == ["a file has spoken in the model's place, and its tokenizer has counted"]
    [kept] = part(said, "kept tokens").splitlines()
    assert kept.startswith("policy: 2 of 2 turns kept the tokens that were sampled (100%)")
    assert "in each group all rewards are equal; every rollout was told" in part(said, "datums")
    assert "The tiny base model has played" not in said
    (kept_run,) = (project / "runs" / "dryruns").iterdir()
    trajectories = read_table(folder_of(f"dryruns/{kept_run.name}").trajectories("policy", 0))
    assert trained_texts(trajectories) == [4, 4]


def trained_texts(trajectories: pa.Table) -> list[int]:
    """Count the ends of trained stretches of tokens: two of each answer."""
    masks = trajectories["mask"].to_pylist()
    return [sum(a != b for a, b in zip([0, *mask], [*mask, 0], strict=True)) for mask in masks]


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_program_that_rewrites_its_history_is_told_which_message_breaks_the_prefix(
    project: Path,
) -> None:
    write_agent(project, 'messages[-1]["content"] = "I have looked."')
    status, said = dry(project, LOOKS, DONE)
    assert status == 0, said
    kept, why = part(said, "kept tokens").splitlines()
    assert kept.endswith("not kept: 2 by unknown")
    assert "call 1 of the policy: the answer of call 0 was 'I look.' and is 'I have looked.'" in why
    assert why.endswith("(in 2 rollouts)")
    assert list((project / "runs" / "dryruns").iterdir()) == []


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_what_the_file_says_in_vain_is_listed(project: Path) -> None:
    status, said = dry(project, {"tools": [{"name": "bash", "arguments": {}}]}, DONE, LOOKS)
    assert status == 0, said
    *_, wrong, unsaid = part(said, "program").splitlines()
    assert wrong == "line 1 calls bash, and the program offers look"
    assert unsaid.startswith("line 3 was said to nobody: the role policy made no further call")


@pytest.mark.parametrize(
    ("turn", "more", "why"),
    [
        ({"role": "judge", **DONE}, (), "no policy answers the role 'judge'; give one of policy"),
        (DONE, ("--set", "roles.judge=openai/gpt-5-mini"), "which needs a network"),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_starts(
    project: Path, turn: dict[str, Any], more: tuple[str, ...], why: str
) -> None:
    file = project / "turns.jsonl"
    file.write_text(json.dumps(turn))
    words = ["dryrun", "hello", "--set", "agent=looking", *more]
    said = CliRunner().invoke(app, [*words, "--say", str(file)])
    assert said.exit_code != 0
    assert why in str(said.exception)
    assert not (project / "runs").exists()


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_program_that_asks_nothing_would_train_nothing_and_the_status_says_so(
    project: Path,
) -> None:
    (project / "agents" / "looking.py").write_text(SILENT)
    status, said = dry(project, DONE)
    assert status != 0
    assert "would learn nothing: no rollout with a reward has a call" in part(said, "datums")
