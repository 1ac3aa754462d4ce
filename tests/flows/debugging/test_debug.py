"""`debug` plays a recorded rollout again: its answers, its failure, and the user's debugger."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import tinker
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.flows.debug import Rerun, debug_rollout
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.recording.recorded_rollouts import find_rollout
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder
from tests.support.door.played_batch import Stage, open_stage
from tests.support.runs.small_recipe import small_recipe

ROOT = Path(__file__).parents[3]
ROLLOUT = "train-00000-0000-01"
MODULE = "tests.support.agents.debugged_agent"
PROGRAM = f"{sys.executable} {ROOT / 'tests' / 'support' / 'agents' / 'debugged_agent.py'}"
AGENTS = {
    "function": f"{MODULE}:play",
    "crew": f"{MODULE}:crew",
    "command": f"command:{PROGRAM} command",
    "forks": f"forks:{PROGRAM} command",
    "resident": f"resident:{PROGRAM} resident",
}

pytestmark = pytest.mark.usefixtures("no_tinker")


@pytest.fixture(scope="module")
def stage(root: Path) -> Iterator[Stage]:
    """An engine that keeps its state where a run named `function` has it."""
    with open_stage(root / "function" / "engine") as stage:
        yield stage


@pytest.fixture
def flags(tmp_path: Path) -> Path:
    folder = tmp_path / "flags"
    folder.mkdir()
    return folder


def record(stage: Stage, root: Path, kind: str, flags: Path, **changes: Any) -> RunFolder:
    """Record a pair of rollouts of an agent that fails, as a run has them."""
    run, agent = RunFolder(root / kind), AGENTS[kind.partition("-")[0]]
    for path in (run.manifest, run.journal("train-00000.0"), run.spans("train-00000.0")):
        path.unlink(missing_ok=True)
    rollouts = {"max_tokens": 8, **changes}
    recipe = small_recipe(agent=agent, rollouts=rollouts)
    write_manifest(run, recipe.model_dump(mode="json"), recipe.fingerprint())
    stage.play(run.path, agent, [{"flags": str(flags)}], max_calls=changes.get("max_calls"))
    return run


@pytest.fixture
def failed(stage: Stage, root: Path, flags: Path) -> RunFolder:
    return record(stage, root, "function", flags)


def said_in(error: str) -> tuple[str, str]:
    """Return the two answers that the agent's error quotes."""
    found = re.match(r"ValueError: after (.+), (.+) cannot be read", error)
    assert found is not None, error
    return found[1], found[2]


def contents(run: RunFolder) -> dict[Path, str]:
    files = [path for path in run.path.rglob("*") if path.is_file()]
    return {path: sha256(path.read_bytes()).hexdigest() for path in files}


def debugged(run: RunFolder, *, sample: bool = False) -> Rerun:
    return debug_rollout(run, ROLLOUT, sample=sample, stop=False)


def test_a_failed_rollout_fails_in_the_same_way_and_changes_nothing(
    failed: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(failed)
    rerun = debugged(failed)
    assert rerun.recorded.end.startswith("ValueError: after ")
    assert "debugged_agent.py:" in rerun.recorded.end
    assert (rerun.end, rerun.answered) == (rerun.recorded.end, 2)
    assert rerun.lines()["now"] == "the same"
    assert "in play\n    raise ValueError(" in capfd.readouterr().err
    assert contents(failed) == before


def test_a_rollout_that_ended_well_gets_its_reward_again(
    stage: Stage, root: Path, flags: Path
) -> None:
    (flags / "well").touch()
    run = record(stage, root, "function-well", flags)
    assert debugged(run).lines() == {
        "played": f"{ROLLOUT}, attempt 0, 2 of 2 calls answered from the record",
        "was": "reward 1",
        "now": "the same",
    }


def test_the_first_request_that_differs_is_shown_beside_the_recorded_one(
    failed: RunFolder, flags: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (flags / "other").touch()
    with pytest.raises(UserError, match=r"differs, and then ended by HTTPError.*--sample"):
        debugged(failed)
    said = capfd.readouterr().err
    assert "call 1 of the role policy differs from the recorded one:" in said
    assert '-      "content": "What do you like?",' in said
    assert '+      "content": "What do you eat?",' in said
    assert said.count("differs from the recorded one:") == 1
    assert "Traceback" not in said, "the end is the refusal"


@pytest.mark.story
def test_the_difference_stands_below_whatever_a_library_prints(
    stage: Stage, root: Path, flags: Path
) -> None:
    run = record(stage, root, "crew", flags)
    (flags / "other").touch()
    said = at_terminal([run.name, ROLLOUT], [])
    _, _, shown = said.partition("call 0 of the role policy differs from the recorded one:")
    assert "Traceback" not in said
    assert len(shown.splitlines()) < 25, shown
    assert '+      "content": "Whose?",' in shown
    assert "give --sample to have" in shown


def test_a_call_that_was_not_recorded_is_one_that_differs(
    stage: Stage, root: Path, flags: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = record(stage, root, "function-short", flags, max_calls=1)
    assert debugged(run).lines()["now"] == "the same"  # the second call is refused again
    assert debugged(run).answered == 1
    changed = small_recipe(agent=AGENTS["function"], rollouts={"max_tokens": 8})
    write_manifest(run, changed.model_dump(mode="json"), changed.fingerprint())
    with pytest.raises(UserError):
        debugged(record_without_refusals(run))
    assert "call 1 of the role policy is one that the recorded rollout has not:" in (
        capfd.readouterr().err
    )


def record_without_refusals(run: RunFolder) -> RunFolder:
    """Leave the refused calls out of a run's journal."""
    journal = run.journal("train-00000.0")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"kind":"refused"' not in line))
    return run


def test_a_call_that_was_refused_is_refused_again(stage: Stage, root: Path, flags: Path) -> None:
    (flags / "long").touch()
    run = record(stage, root, "function-long", flags)
    assert [one.code for one in find_rollout(run, ROLLOUT).refused] == ["context_length_exceeded"]
    rerun = debugged(run)
    assert rerun.end == rerun.recorded.end
    assert "HTTP Error 400" in rerun.end


def test_with_sample_the_runs_model_answers_what_differs(
    stage: Stage, failed: RunFolder, flags: Path
) -> None:
    server = stage.service.server
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    [saved] = rest.list_user_checkpoints().result().checkpoints
    Ledger(failed.checkpoints(POLICY)).add(Checkpoint(0, saved.tinker_path))
    (flags / "other").touch()
    before = contents(failed)
    rerun = debugged(failed, sample=True)
    assert rerun.answered == 1
    assert said_in(rerun.end)[0] == said_in(rerun.recorded.end)[0]
    assert contents(failed) == before


def test_what_cannot_be_debugged_is_refused(failed: RunFolder) -> None:
    def refused(name: str) -> str:
        with pytest.raises(RunError) as caught:
            debug_rollout(failed, name, sample=False, stop=False)
        return str(caught.value)

    assert "does not name a rollout; " in refused("nonsense")
    assert "did you mean 'train-00000-0000-0" in refused("train-00000-0000-07")
    assert "it has played no train-00009" in refused("train-00009-0000-00")
    journal = failed.journal("train-00000.0")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"kind":"error"' not in line))
    assert "has not ended, so that nothing is known to debug" in refused(ROLLOUT)
    printed = CliRunner().invoke(app, ["debug", "--help"])
    assert "Open pdb where the agent fails." in printed.output


def at_terminal(words: Sequence[str], answers: Sequence[str]) -> str:
    """Run the command at a terminal, and give each prompt of pdb an answer; return what it says."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ratchet.flows.cli.main", "debug", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        said, left = "", [*answers]
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the terminal's other end is closed
                break
            said += part.decode()
            if left and said.rstrip(" ").endswith("(Pdb)"):
                said += "\n"
                os.write(ours, f"{left.pop(0)}\n".encode())
        process.wait(60)
    os.close(ours)
    assert not left, said
    return said


def test_a_function_stops_at_its_breakpoint_and_where_it_fails(
    failed: RunFolder, flags: Path
) -> None:
    (flags / "stop").touch()
    said = at_terminal(
        [failed.name, ROLLOUT, "--pdb"], ["p first", "c", "p 'second' + second", "q"]
    )
    first, second = said_in(find_rollout(failed, ROLLOUT).end)
    assert f"\n{first}" in said
    assert f"second{second[1:-1]}" in said.partition("Traceback")[2]
    assert "now     the same" in said


@pytest.mark.story
@pytest.mark.parametrize("kind", ["crew", "command", "forks", "resident"])
def test_every_kind_of_agent_stops_at_its_breakpoint(
    kind: str, stage: Stage, root: Path, flags: Path
) -> None:
    run = record(stage, root, kind, flags)
    (flags / "stop").touch()
    said = at_terminal([kind, ROLLOUT], ["p len(example), 6 * 7", "c"])
    assert "(1, 42)" in said
    assert "cannot be read" in find_rollout(run, ROLLOUT).end
    assert "now     the same" in said
