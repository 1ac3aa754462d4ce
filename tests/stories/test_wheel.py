"""The wheel in a new environment, in an empty folder: what a user does first."""

import json
import os
import re
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from ratchet.flows.cli.new_project import AGENT, PROJECT_KINDS
from tests.support.processes import ROOT
from tests.support.servers.prefect_team import open_team, read_log, wait_for_schedule

PYTHON = ROOT / os.environ.get("WHEEL_PYTHON", ".venv-wheel/bin/python")
pytestmark = [
    pytest.mark.story,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON} to build the wheel; run `make wheel`"
    ),
]

SMALL = {
    "steps": 2,
    "rollouts.groups": 2,
    "rollouts.group_size": 4,
    "evaluation.examples": 2,
    "evaluation.greedy": "false",
}
SECONDS = 900
"""Time for one command on a busy machine; a run takes half a minute on an idle one."""

ALONE = """
from importlib.util import find_spec

from introduce import play

assert [name for name in ("agents", "datasets", "tests", "runs") if find_spec(name)] == []
"""
UNTOUCHED = """
from base64 import urlsafe_b64encode
from hashlib import sha256
from importlib.metadata import files
from importlib.util import find_spec

assert "site-packages" in find_spec("adapters").origin
for file in files("adapters"):
    if file.hash:
        digest = urlsafe_b64encode(sha256(file.read_binary()).digest())
        assert digest.decode().rstrip("=") == file.hash.value, file
"""
OWN = """
import adapters.games
import engine
import flows
import introduce
import tasks


async def play(example, **endpoint):
    own = tasks.SHARE + flows.SHARE + engine.SHARE + adapters.games.SHARE
    return own + await introduce.play(example, **endpoint)
"""


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new environment; its dependencies are this one's.

    It has the wheel, and beside it the package index's `adapters`, whose name is a folder's here.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, timeout=SECONDS)
    [wheel] = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    [packages] = environment.glob("lib/python*/site-packages")
    # A folder on the path, whose own .pth files do not count: an editable install is not seen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    install = [*pip, "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "adapters"], check=True, timeout=SECONDS)
    subprocess.run([*install, "--no-index", str(wheel)], check=True, timeout=SECONDS)
    return python.parent


@pytest.fixture(scope="module")
def variables() -> Mapping[str, str]:
    """The environment of a user who has neither a checkout nor a service."""
    own = ("PYTHONPATH", "RATCHET_RUNS")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith(("PREFECT_", "TINKER_"))
    }


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, binaries: Path, variables: Mapping[str, str]
) -> Path:
    """A folder that had nothing in it before `ratchet init`."""
    folder = tmp_path_factory.mktemp("project")
    run(folder, variables, binaries / "ratchet", "init")
    return folder


def run(folder: Path, variables: Mapping[str, str], command: Path, *words: str) -> str:
    """Run a command in a folder, and return what it prints; DuckDB has nothing to complain of."""
    ran = subprocess.run(
        [str(command), *words],
        cwd=folder,
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "leaked" not in ran.stderr, ran.stderr
    return ran.stdout


def small(**changes: object) -> Iterator[str]:
    for key, value in {**SMALL, **changes}.items():
        yield from ("--set", f"{key}={value}")


def test_the_wheel_brings_its_pins_as_the_page_says(
    tmp_path: Path, binaries: Path, variables: Mapping[str, str]
) -> None:
    [wheel] = binaries.parent.parent.glob("*.whl")
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert f"    python -m zipfile -e {wheel.name} unpacked\n" in page
    [pins] = re.findall(rf"--constraint (\S+) '{wheel.name}\[agents,dask\]'", page)
    run(tmp_path, variables, binaries / "python", "-m", "zipfile", "-e", str(wheel), "unpacked")
    assert (tmp_path / pins).read_bytes() == (ROOT / "constraints.txt").read_bytes()


def test_every_kind_of_project_passes_its_own_test(
    tmp_path: Path, binaries: Path, variables: Mapping[str, str]
) -> None:
    """pytest is given as its console script is: without the working folder on the path."""
    for kind, of in PROJECT_KINDS.items():
        if not all(find_spec(module) for module in of.needs or ()):
            continue
        folder = tmp_path / kind
        run(tmp_path, variables, binaries / "ratchet", "init", "--kind", kind, str(folder))
        tests = "-P", "-m", "pytest", "-p", "no:cacheprovider"
        assert " passed" in run(folder, variables, binaries / "python", *tests)


def test_an_example_is_trained_in_the_user_s_folder(
    project: Path, binaries: Path, variables: Mapping[str, str]
) -> None:
    said = run(project, variables, binaries / "ratchet", "train", "hello", *small())
    assert " in 2 steps\n" in said
    [metrics] = project.glob("runs/hello-*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2
    page = run(project, variables, binaries / "ratchet", "report", metrics.parent.name)
    assert "</html>" in (project / page.strip()).read_text()


def test_the_new_project_s_test_passes_and_its_agent_plays(
    project: Path, binaries: Path, variables: Mapping[str, str]
) -> None:
    run(project, variables, binaries / "python", "-m", "pytest", "-p", "no:cacheprovider", "tests")
    said = run(project, variables, binaries / "ratchet", "dryrun", AGENT, "--examples", "1")
    assert "# transcript" in said


def test_no_folder_of_the_project_is_a_package_to_its_agent(
    project: Path, binaries: Path, variables: Mapping[str, str]
) -> None:
    (project / "agents" / "alone.py").write_text(ALONE)
    alone = ["dryrun", AGENT, "--set", "agent=alone", "--examples", "1"]
    assert "# transcript" in run(project, variables, binaries / "ratchet", *alone)


@pytest.fixture(scope="module")
def named_as_ours(project: Path) -> Path:
    """The project with an agent that imports modules called as the repository's folders are."""
    (project / "agents" / "own.py").write_text(OWN)
    for name in ("tasks.py", "engine.py", "flows/__init__.py", "adapters/games.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("SHARE = 0.125\n")
    (project / "adapters" / "__init__.py").touch()
    return project


def test_the_wheel_has_one_import_name_and_touches_no_other(
    tmp_path: Path, binaries: Path, variables: Mapping[str, str]
) -> None:
    [wheel] = binaries.parent.parent.glob("*.whl")
    with ZipFile(wheel) as packed:
        roots = {name.split("/")[0] for name in packed.namelist()}
    assert roots == {"ratchet", "ratchet_rl-0.1.0.dist-info"}
    run(tmp_path, variables, binaries / "python", "-c", UNTOUCHED)


@pytest.mark.parametrize("runner", ["threads", "dask"])
def test_an_agent_s_modules_called_as_ours_are_its_own(
    named_as_ours: Path, binaries: Path, variables: Mapping[str, str], runner: str
) -> None:
    own = small(agent="own", steps=1, **{"rollouts.runner": runner})
    said = run(
        named_as_ours, variables, binaries / "ratchet", "train", AGENT, "--run", runner, *own
    )
    assert " in 1 step\n" in said
    [row] = (named_as_ours / "runs" / runner / "metrics.jsonl").read_text().splitlines()
    assert 0.5 <= json.loads(row)["reward/mean"] <= 1.5


def test_a_schedule_of_the_new_project_trains_on_a_server(
    named_as_ours: Path, binaries: Path, variables: Mapping[str, str], tmp_path: Path
) -> None:
    declared = yaml.safe_load((named_as_ours / "prefect.yaml").read_text())
    [training] = declared["deployments"]
    training["parameters"]["recipe"] |= {
        "agent": "own",
        "steps": 1,
        "rollouts": {"groups": 2, "group_size": 2},
        "evaluation": {"examples": 2, "greedy": False},
    }
    training["schedules"] = [{"interval": 60}]
    (named_as_ours / "prefect.yaml").write_text(
        yaml.safe_dump(declared | {"deployments": [training]})
    )
    with open_team([str(binaries / "ratchet")], named_as_ours, tmp_path, variables) as api:
        deployment = api.get(f"/deployments/name/train/{AGENT}").json()
        ended = wait_for_schedule(api, deployment["id"])
        assert ended["state"]["type"] == "COMPLETED", read_log(api, ended["id"])
    assert ended["state"]["message"].startswith("held-out reward ")
    made = json.loads((named_as_ours / "runs" / ended["name"] / "manifest.json").read_text())
    assert made["recipe"]["agent"] == "own"
