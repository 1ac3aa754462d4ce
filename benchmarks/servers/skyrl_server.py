"""SkyRL's server as a process, on a folder of a model that the engine ships."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.interruptions.killable_runs import free_port
from ratchet.adapters.process.child import end_with_this_process, has_ended
from ratchet.engine.model import base_models

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-skyrl" / "bin" / "python"
STARTING_SECONDS = 300
CLOSING_SECONDS = 30
BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": 32,
    "train_micro_batch_size": 32,
    "sample_max_num_sequences": 128,
}
KEY = "tml-no-key-is-asked-for"


@dataclass(frozen=True)
class SkyRL:
    """A server that answers: its URL, its process, and its version."""

    url: str
    process: subprocess.Popen[bytes]
    version: str


def version_of(python: Path = PYTHON) -> str:
    """Return the version of skyrl that a Python has; SystemExit if it has none."""
    if not python.exists():
        raise SystemExit(f"SkyRL is not installed: there is no {python}; run `make servers`")
    said = "import importlib.metadata as m; print(m.version('skyrl'))"
    return subprocess.run(
        [python, "-c", said], capture_output=True, text=True, check=True
    ).stdout.strip()


@contextmanager
def skyrl_server(folder: Path, base: str = base_models.TINY_CHAT) -> Iterator[SkyRL]:
    """Serve a base by the name that recipes have for it, which SkyRL finds in the hub's cache."""
    version = version_of()
    cache = _cache_of(base, folder / "huggingface")
    port = free_port()
    command = [
        *(str(PYTHON), "-P", str(Path(__file__).with_name("skyrl_program.py"))),
        *("--base-model", base, "--backend", "jax", "--backend-config", json.dumps(BACKEND)),
        *("--checkpoints-base", str(folder / "checkpoints")),
        *("--database-url", f"sqlite:///{folder / 'skyrl.db'}", "--port", str(port)),
    ]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    variables = {**kept, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=variables, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    end_with_this_process(-process.pid)
    try:
        server = SkyRL(f"http://127.0.0.1:{port}", process, version)
        _wait_for(server, folder / "server.log")
        yield server
    finally:
        _end(process)


def _cache_of(base: str, home: Path) -> Path:
    """Make a cache of the hub that has the base under its name, as a folder of links."""
    entry = home / "hub" / f"models--{base.replace('/', '--')}"
    snapshot = entry / "snapshots" / "here"
    snapshot.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text(snapshot.name)
    for file in base_models.find(base).folder.iterdir():
        link = snapshot / file.name
        if file.is_file() and not link.exists():
            link.symlink_to(file.resolve())
    return home


def _wait_for(server: SkyRL, log: Path) -> None:
    until = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"SkyRL's server did not start; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server, which ends its engine; kill both if they do not end."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in psutil.wait_procs(family, CLOSING_SECONDS)[1]:
        one.kill()
    has_ended(-process.pid)
