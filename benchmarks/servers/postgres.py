"""A Prefect server on a PostgreSQL of its own, whose files are in a folder: `make server-postgres`.

PostgreSQL refuses to run as root; root has it run by the user that Debian's package makes.
"""

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.interruptions.killable_runs import free_port

HOST, USER, ORDINARY = "127.0.0.1", "ratchet", "postgres"
MISSING = "PostgreSQL is not installed; Debian has it in the package postgresql"


def find_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs; None if there is none."""
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_version)
    return Path(found).parent if found else debian[-1].parent if debian else None


def _version(initdb: Path) -> int:
    return int(initdb.parts[-3]) if initdb.parts[-3].isdecimal() else 0


class Postgres:
    """A PostgreSQL on loopback, for whom has its password, and its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._programs = find_programs()
        if self._programs is None:
            raise SystemExit(MISSING)
        self._folder, self._port = folder, free_port()
        secret = folder / "password"
        if not secret.exists():
            folder.mkdir(parents=True, exist_ok=True)
            secret.touch(0o600)
            secret.write_text(secrets.token_urlsafe())
            if os.geteuid() == 0:
                shutil.chown(folder, ORDINARY)
                shutil.chown(secret, ORDINARY)
            words = ("--auth=scram-sha-256", f"--pwfile={secret}", "--locale=C.UTF-8")
            self._call("initdb", "-U", USER, *words)
        self.url = f"postgresql+asyncpg://{USER}:{secret.read_text()}@{HOST}:{self._port}/postgres"

    def start(self) -> None:
        at = f"-p {self._port} -c listen_addresses={HOST} -c unix_socket_directories=''"
        self._call("pg_ctl", "-w", "-l", str(self._folder / "log"), "-o", at, "start")

    def stop(self, how: str = "fast") -> None:
        self._call("pg_ctl", "-m", how, "stop")

    def _call(self, program: str, *words: str) -> None:
        assert self._programs is not None
        done = subprocess.run(
            [self._programs / program, "-D", self._folder / "data", *words],
            cwd=self._folder,
            user=ORDINARY if os.geteuid() == 0 else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{program} in {self._folder}: {done.stderr}")


@contextmanager
def running_postgres(folder: Path) -> Iterator[Postgres]:
    """Run a PostgreSQL in a block."""
    database = Postgres(folder)
    database.start()
    try:
        yield database
    finally:
        database.stop()


def main() -> None:
    """Run `ratchet server` on the PostgreSQL of a folder, until Ctrl-C."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, help="of the database's files")
    options.add_argument("--port", default="4200", help="of the Prefect server")
    asked = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running_postgres(asked.folder.resolve()) as database:
        variables = {**os.environ, "PREFECT_API_DATABASE_CONNECTION_URL": database.url}
        command = [sys.executable, "-m", "ratchet.flows.cli.main", "server", "--port", asked.port]
        with subprocess.Popen(command, env=variables) as server:
            try:
                server.wait()
            except KeyboardInterrupt:
                server.terminate()


if __name__ == "__main__":
    main()
