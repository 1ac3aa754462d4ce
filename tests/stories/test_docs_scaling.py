"""docs/scaling.md, run: its certificates, its cluster and its training, all on loopback."""

import ast
import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import certifi
import httpx
import psutil
import pytest
import yaml

pytest.importorskip("distributed", reason="Dask is not installed: make setup")

from dask import config
from distributed import Security
from distributed.comm.core import connect

from ratchet.adapters.door.door import Door
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness import dask_cluster
from ratchet.adapters.harness.dask_cluster import listener_at, open_cluster
from tests.support.door.opened_door import CHAT
from tests.support.door.played_shard import AGENT, EXAMPLES, PlayedShard
from tests.support.processes import ROOT, free_port, wait_until

pytestmark = pytest.mark.story

DOCUMENT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
PLACES, CERTIFICATES, VARIABLES, SCHEDULER, WORKER, TRAIN = re.findall(
    r"^```sh\n(.*?)^```$", DOCUMENT, re.M | re.S
)
[SLURM] = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.M | re.S)
[KUBERNETES] = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT, re.M | re.S))
TLS = "DASK_DISTRIBUTED__COMM__TLS__"


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the document's shells, whose certificates name 127.0.0.1."""
    places = {"FLOW": "127.0.0.1", "CERTS": str(tmp_path_factory.mktemp("certificates"))}
    assert re.findall(r"(\w+)=", PLACES) == [*places]
    environment = {**os.environ, **places}
    subprocess.run(
        ["bash", "-ec", here(CERTIFICATES)], env=environment, check=True, capture_output=True
    )
    said = subprocess.run(
        ["bash", "-ec", f"{VARIABLES}\nenv -0"], env=environment, check=True, capture_output=True
    )
    lines = said.stdout.decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def in_shell(variables: dict[str, str]) -> Iterator[None]:
    """This process in the environment of the document's shells, as Dask and TLS read it."""
    ours = {k: v for k, v in variables.items() if k.startswith(("DASK_", "SSL_"))}
    settings = {
        name.removeprefix("DASK_").lower().replace("__", "."): value
        for name, value in ours.items()
        if name.startswith(TLS)
    }
    with pytest.MonkeyPatch.context() as patch, config.set(settings):
        for name, value in ours.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> Iterator[str]:
    """The document's scheduler and worker; the scheduler's address."""
    port, folder = free_port(), tmp_path_factory.mktemp("cluster")
    with (
        ended_with_the_block(here(SCHEDULER, port), variables, folder / "scheduler.log"),
        ended_with_the_block(here(WORKER, port), variables, folder / "worker.log"),
    ):
        log = folder / "worker.log"
        wait_until("a worker", lambda: log.exists() and "Registered to" in log.read_text())
        yield f"tls://127.0.0.1:{port}"


@contextmanager
def ended_with_the_block(script: str, variables: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env=variables | {"PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def here(script: str, port: int = 8786) -> str:
    """Return a script of the document with this Python's programs, and a port for 8786."""
    programs = {
        "ratchet": f"{sys.executable} -m ratchet.flows.cli.main",
        "dask": f"{sys.executable} -m dask",
        "python": sys.executable,
    }
    script = re.sub(r"\.venv/bin/(\w+)", lambda found: programs[found[1]], script)
    return script.replace("8786", str(port))


def test_the_certificates_are_strict_and_the_key_of_the_authority_is_private(
    variables: dict[str, str],
) -> None:
    folder = Path(variables["CERTS"])
    assert folder.stat().st_mode & 0o077 == 0
    subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "node.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.mark.usefixtures("in_shell")
def test_a_shard_is_played_over_tls(tmp_path: Path, cluster: str) -> None:
    listener = listener_at(f"https://127.0.0.1:{free_port()}")
    with (
        PlayedShard(tmp_path, AGENT, EXAMPLES, 2, listener) as shard,
        open_cluster(cluster, 2) as opened,
    ):
        assert shard.door.address == listener.url(listener.port)
        assert shard.door.address.startswith("https://")
        shard.play(opened.play)
    assert {end["kind"] for end in shard.ends()} == {"reward"}


@pytest.mark.usefixtures("in_shell")
def test_the_door_over_tls_is_believed_by_its_authority_only() -> None:
    with Door(CHAT, {}, run_seed=0, listener=listener_at("https://127.0.0.1:0")) as door:
        trusting = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
        url = f"{door.address}/batch/train-00000.0/begin"
        assert httpx.post(url, verify=trusting).status_code == 401
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.post(url, verify=ssl.create_default_context(cafile=certifi.where()))
        with pytest.raises(httpx.TransportError):
            httpx.post(url.replace("https:", "http:"))


def test_clients_without_a_certificate_of_the_authority_are_refused(
    cluster: str, variables: dict[str, str]
) -> None:
    address = cluster.removeprefix("tls://")
    authority = variables[f"{TLS}CA_FILE"]
    nobody = ssl.create_default_context(cafile=authority)
    nobody.check_hostname = False
    strangers: list[tuple[str, dict[str, Any]]] = [
        (f"tls://{address}", {"ssl_context": nobody}),
        (f"tls://{address}", Security.temporary().get_connection_args("client")),
        (f"tcp://{address}", {}),
    ]
    for url, options in strangers:
        with pytest.raises(OSError):  # noqa: PT011  whichever side notices first
            asyncio.run(connect(url, timeout=3, **options))
    ours = Security(
        tls_ca_file=authority,
        tls_client_cert=variables[f"{TLS}CLIENT__CERT"],
        tls_client_key=variables[f"{TLS}CLIENT__KEY"],
        require_encryption=True,
    )
    asyncio.run(connected(f"tls://{address}", ours))


async def connected(url: str, security: Security) -> None:
    """Open a connection to a scheduler, with its handshake, and close it."""
    opened = await connect(url, timeout=20, **security.get_connection_args("client"))
    await opened.close()


def test_a_cluster_with_tls_needs_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"has no distributed\.comm\.tls\.client\.cert and"):
        listener_at("https://127.0.0.1:0")
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 1.0)
    with (
        pytest.raises(UserError, match="set DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT"),
        open_cluster("tls://127.0.0.1:1", 1),
    ):
        pass


def test_http_is_answered_on_loopback_only(cluster: str) -> None:
    """The ports that other machines reach belong to TLS, and so do not answer."""
    sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    ours = [one for one in sockets if one.pid and is_of_dask(psutil.Process(one.pid))]
    assert len(ours) >= 4, "scheduler, its HTTP server, nanny and worker"
    for host, port in (cast("tuple[str, int]", one.laddr) for one in ours):
        if host != "127.0.0.1":
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=20)


def is_of_dask(process: psutil.Process) -> bool:
    """Return whether a process is Dask's command, or one that Dask has started."""
    command = process.cmdline()
    return "dask" in command or any("spawn_main" in word for word in command)


def test_the_training_of_the_document_runs(
    tmp_path: Path, cluster: str, variables: dict[str, str]
) -> None:
    script = here(TRAIN, int(cluster.rpartition(":")[2])).replace("8600", str(free_port())).strip()
    small = "--set steps=1 --set rollouts.groups=8 --set evaluation.examples=4"
    places = {"RATCHET_RUNS": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}
    ran = subprocess.run(
        ["bash", "-ec", f"{script} --run doc {small}"],
        cwd=ROOT,
        env=variables | places | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "doc" / "spans").glob("train-00000.*.parquet"))) == 8


def test_the_resource_of_the_document_has_the_variables_and_options_of_its_commands() -> None:
    spec = KUBERNETES["spec"]
    for part, command in (("scheduler", SCHEDULER), ("worker", WORKER)):
        [container] = spec[part]["spec"]["containers"]
        said = {word for word in container["args"] if word.startswith("--")}
        asked = {*re.findall(r"--[\w-]+", command)} - {"--host"}
        assert asked <= said
        known = subprocess.run(
            [sys.executable, "-m", "dask", part, "--help"], capture_output=True, text=True
        )
        assert said <= {*re.findall(r"--[\w-]+", known.stdout)}
        names = {variable["name"] for variable in container["env"]}
        assert {*re.findall(r"\b([A-Z_]{9,})=", VARIABLES)} <= names


def test_the_slurm_program_binds_the_port_and_the_http_of_the_documents_commands() -> None:
    [call] = [
        node
        for node in ast.walk(ast.parse(SLURM))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SLURMCluster"
    ]
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    scheduler = ast.literal_eval(given["scheduler_options"])
    option, address = ast.literal_eval(given["worker_extra_args"])
    assert f"--port {scheduler['port']}" in SCHEDULER
    assert f"--dashboard-address {scheduler['dashboard_address']}" in SCHEDULER
    assert f"{option} {address}" in WORKER
    assert given["protocol"] == "'tls://'"
