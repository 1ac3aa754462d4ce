"""The image and the work pool of Kubernetes: what they name is the project's and Prefect's own."""

import asyncio
import json
import re
import subprocess
import tomllib
from typing import Any, cast

import pytest
import yaml
from prefect.utilities.schema_tools.validation import is_valid_schema, validate
from prefect.utilities.templating import find_placeholders
from prefect.workers.base import BaseJobConfiguration
from pydantic import Field

from tests.support.processes import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "prefect.md").read_text(encoding="utf-8")
POOL = json.loads((ROOT / "docs" / "kubernetes" / "work_pool.json").read_text(encoding="utf-8"))
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|AUTH)", re.I)


class Job(BaseJobConfiguration):
    """The fields that a work pool of Kubernetes has beside those of every pool."""

    annotations: dict[str, str] = Field(default_factory=dict)
    namespace: str = "default"
    job_manifest: dict[str, Any]
    job_watch_timeout_seconds: int | None = None
    pod_watch_timeout_seconds: int = 60
    stream_output: bool = True


def instructions(name: str) -> list[str]:
    """Return what follows a word of the Dockerfile, an instruction each."""
    whole = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.+)$", whole, re.M)


def job_of(**variables: Any) -> Job:
    """Return a flow run's job, as Prefect makes it of the template and a deployment's variables."""
    validate(variables, POOL["variables"], raise_on_error=True)
    return asyncio.run(Job.from_template_and_values(POOL, variables, client=cast(Any, object())))


def pod_of(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification of a job's pod, and that of its container."""
    pod = job.job_manifest["spec"]["template"]["spec"]
    return pod, *pod["containers"]  # type: ignore[return-value]


def test_the_image_installs_extras_that_exist_by_the_constraints_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (extras,) = re.findall(r"EXTRAS=(\S+)", DOCKERFILE)
    assert set(extras.split(",")) <= {*project["optional-dependencies"]} - {"dev"}
    assert "pyproject.toml constraints.txt ./" in instructions("COPY")
    (install,) = [one for one in instructions("RUN") if "[${EXTRAS}]" in one]
    assert "--constraint constraints.txt" in install


def test_the_image_runs_a_worker_as_a_user_who_is_not_root() -> None:
    assert [one.split(":")[0] for one in instructions("USER")] == ["1000"]
    assert json.loads(instructions("CMD")[-1]) == ["ratchet", "worker"]


def test_nothing_like_a_key_is_an_argument_or_a_variable_of_the_image() -> None:
    assert not [one for name in ("ARG", "ENV") for one in instructions(name) if SECRET.search(one)]


def test_what_goes_into_the_image_is_what_the_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    links = {one.readlink().parts[-1] for one in (ROOT / "ratchet").rglob("*") if one.is_symlink()}
    assert sent == links | {"LICENSE", "README.md", "pyproject.toml", "ratchet"}


def test_the_builder_is_the_first_that_there_is() -> None:
    said = subprocess.run(
        ["make", "--dry-run", "image", "BUILDER=one-of-them"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "one-of-them build" in said


def test_every_variable_of_the_pool_is_used_and_every_one_used_is_described() -> None:
    named = {one.name for one in find_placeholders(json.dumps(POOL["job_configuration"]))}
    properties = POOL["variables"]["properties"]
    assert named == {*properties}
    assert is_valid_schema(POOL["variables"]) is None
    assert all(one["description"] for one in properties.values())


def test_a_job_has_no_rights_and_its_keys_come_from_a_secret_alone() -> None:
    pod, container = pod_of(job_of(image="agents:1", env={"RATCHET_PRICES": "prices.json"}))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert str(pod["securityContext"]["runAsUser"]) == instructions("USER")[0].split(":")[0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == "agents:1"
    assert container["envFrom"] == [{"secretRef": {"name": "ratchet-keys"}}]
    assert container["env"] == {"RATCHET_PRICES": "prices.json"}  # a list when it is sent
    assert pod["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize("volume", [None, {"name": "runs", "emptyDir": {}}])
def test_a_job_has_each_volume_that_it_mounts_and_runs_are_in_one(volume: Any) -> None:
    chosen = {} if volume is None else {"runs": volume}
    pod, container = pod_of(job_of(image="agents:1", **chosen))
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts.keys() == {one["name"] for one in pod["volumes"]}
    assert f"RATCHET_RUNS={mounts['runs']}" in instructions("ENV")[0]
    assert volume is None or volume in pod["volumes"]


def test_the_page_gives_job_variables_that_the_pool_has() -> None:
    section = PAGE.split("## On Kubernetes", 1)[1].split("\n## ", 1)[0]
    given = [
        yaml.safe_load(text)["work_pool"]
        for text in re.findall(r"^```yaml\n(work_pool:.*?)^```$", section, re.M | re.S)
    ]
    assert given
    for pool in given:
        assert job_of(**pool["job_variables"]).job_manifest["kind"] == "Job"
