"""Runs in an object store, a real server's: one owner, nothing lost, and sentences for faults."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.network import bucket
from ratchet.adapters.network.bucket import Bucket, Conflict, StoreError
from ratchet.tasks.storage import mirror
from ratchet.tasks.storage.logs import append_row, read_log
from ratchet.tasks.storage.run_folder import (
    RunError,
    RunFolder,
    all_runs,
    folder_of,
    remove_leftovers,
    runs_root,
)
from tests.support.stores.object_store import KEYS, Line, ObjectStore, line_to, object_store
from tests.support.stores.object_store import variables_for as variables

Machine = Callable[[str], None]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("weed")) as served:
        yield served


@pytest.fixture
def line(store: ObjectStore) -> Iterator[Line]:
    with line_to(store) as opened:
        yield opened


@pytest.fixture
def on(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this process one of another machine: its copy of the store, and its host's name."""
    for name, value in variables(line.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RATCHET_RUNS", f"s3://team/{tmp_path.name}")
    monkeypatch.setattr(mirror, "LOOK_SECONDS", 1e-6)
    monkeypatch.setattr(bucket, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(bucket, "READER_SECONDS", 1)
    mirror._bucket.cache_clear()

    def become(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        monkeypatch.setattr(socket, "gethostname", lambda: name)

    become("a")
    return become


def write(run: RunFolder, files: dict[str, str]) -> None:
    for name, text in files.items():
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(text)


def keep(name: str, files: dict[str, str]) -> RunFolder:
    """Put files of a run into the store, and let go of it."""
    run = folder_of(name)
    with run.stored() as put:
        write(run, files)
        put()
    return run


def contents(run: RunFolder) -> dict[str, str]:
    return {path: (run.path / path).read_text() for path in mirror.list_files(run.path)}


RUN = {"manifest.json": "{}", "spans/one.parquet": "sealed", "journal/one.jsonl": "1\n"}


def test_another_machine_brings_each_file_of_a_run_once_and_weights_if_they_are_asked_for(
    on: Machine, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"engine/tensors/w": "weights"}
    run = keep("run", RUN | weights | {"lock": "", "places/p": "", "report.html": ""})
    on("b")
    [read] = all_runs()
    assert contents(read) == RUN
    on("a")
    keep("run", {"spans/two.parquet": "more"})
    asked, get = list[str](), Bucket.get
    monkeypatch.setattr(Bucket, "get", lambda at, key: asked.append(key) or get(at, key))
    on("b")
    assert contents(folder_of("run").fetched(whole=True)) == contents(run)
    assert len([key for key in asked if key.startswith("objects/")]) == 2
    here = [path.read_bytes() for path in runs_root().rglob("*") if path.is_file()]
    assert not [
        1 for one in [*here, *store.objects().values()] if KEYS["secretKey"].encode() in one
    ]


def test_a_log_is_put_in_few_parts(on: Machine) -> None:
    run = keep("run", RUN)
    with run.stored() as put:
        for number in range(40):
            append_row(run.metrics, {"step": number})
            put()
        assert len(mirror.open_runs[run.path].index.files["metrics.jsonl"]) <= 6
    on("b")
    assert read_log(folder_of("run").metrics) == read_log(run.metrics)


def test_a_batch_that_is_open_is_put_only_each_so_many_seconds(
    on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = {"journal/two.jsonl": "begun\n"}
    keep("run", RUN | begun)
    on("b")
    assert contents(folder_of("run")) == RUN
    monkeypatch.setenv("RATCHET_STORE_SECONDS", "0.1")
    on("a")
    run = folder_of("run")
    with run.stored() as put:
        put()
        write(run, {"journal/two.jsonl": "begun\nlater\n"})
        time.sleep(1)
        on("b")
        assert contents(folder_of("run"))["journal/two.jsonl"] == "begun\nlater\n"
        on("a")
    monkeypatch.setenv("RATCHET_STORE_SECONDS", "soon")
    with pytest.raises(StoreError, match="RATCHET_STORE_SECONDS=soon is no number"), run.stored():
        pass


def test_an_owner_that_comes_back_from_the_dead_puts_nothing(
    on: Machine, store: ObjectStore, tmp_path: Path
) -> None:
    run = folder_of("run")
    with run.stored() as put:
        write(run, RUN)
        put()
        on("b")
        with (later := folder_of("run")).stored() as put_later:
            put_later()
            index = store.objects()[f"{tmp_path.name}/runs/run.json"]
            on("a")
            write(run, {"spans/late.parquet": "late"})
            for _ in range(2):
                with pytest.raises(Conflict, match=r"taken over by process \d+ on b: this process"):
                    run.put()
            assert store.objects()[f"{tmp_path.name}/runs/run.json"] == index
            on("b")
            write(later, {"spans/next.parquet": "next"})
    on("a")
    with run.stored() as put:
        assert contents(run) == RUN | {"spans/next.parquet": "next"}, "b's history is the run's"
        put()


def test_of_two_machines_that_begin_a_run_one_has_it_and_only_training_takes_it_over(
    on: Machine,
) -> None:
    with (run := folder_of("run")).stored() as put:
        on("b")
        with folder_of("run").stored() as put_late:
            write(run, RUN)
            on("a")
            put()
            on("b")
            with pytest.raises(Conflict, match="was taken over by process"):
                put_late()
        with (other := folder_of("run")).stored():
            assert contents(other) == RUN
            with pytest.raises(RunError, match=r"is open in process \d+ on a, or was"):
                other.refuse_elsewhere()
        on("a")
    on("b")
    with other.stored():
        other.refuse_elsewhere()


def test_what_was_not_put_before_a_kill_is_there_when_the_same_machine_goes_on(
    on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(KeyboardInterrupt), (run := folder_of("run")).stored() as put:
        write(run, RUN)
        put()
        write(
            run, {"spans/two.parquet": "2", "journal/two.jsonl": "2\n", "journal/three.jsonl": ""}
        )
        monkeypatch.setattr(mirror.Mirror, "close", lambda *_: None)  # as a kill does
        raise KeyboardInterrupt
    here = contents(run)
    with run.stored() as put:
        assert contents(run) == here
        put()


def test_a_deleted_run_is_gone_everywhere_and_its_name_is_free(on: Machine) -> None:
    keep("run", RUN)
    on("b")
    assert folder_of("run").exists()
    folder_of("run").delete()
    assert not folder_of("run").path.exists()
    on("a")
    assert [all_runs(), folder_of("run").path.exists()] == [[], False]
    keep("run", {"manifest.json": "new"})
    on("b")
    assert contents(folder_of("run")) == {"manifest.json": "new"}


def test_weights_are_removed_from_a_store_by_a_machine_that_brings_none(
    on: Machine, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"engine/tensors/{step}": f"weights {step}" for step in (1, 2)}
    keep("run", RUN | weights)
    on("b")
    run = folder_of("run")
    assert run.engine_files() == dict.fromkeys(weights, 9)
    with run.stored(whole=False) as put:
        put()
        run.remove_files(["engine/tensors/1"])
    assert not run.engine.exists()
    objects = {key for key in store.objects() if key.startswith(f"{tmp_path.name}/objects/")}
    assert remove_leftovers() == (0, 0), "an object may be named by a process that is about to"
    monkeypatch.setattr(bucket, "UNNAMED_SECONDS", -1)
    assert remove_leftovers() == (1, 9)
    on("c")
    assert contents(folder_of("run").fetched(whole=True)) == RUN | {"engine/tensors/2": "weights 2"}
    folder_of("run").delete()
    assert remove_leftovers()[0] == len(objects) - 1


@pytest.mark.parametrize("fault", ["uploads are cut off", "an answer is lost", "it is away"])
def test_a_run_waits_for_the_store_and_nobody_sees_half_of_it(
    on: Machine, line: Line, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    run, weights, began = folder_of("run"), {"engine/tensors/w": "w" * 2**21}, time.monotonic()
    with run.stored() as put:
        write(run, RUN)
        put()
        write(run, weights)
        if fault == "uploads are cut off":
            line.cuts, line.cut_after = 3, 2**20
        elif fault == "an answer is lost":
            line.loses = b"PUT /team/" + tmp_path.name.encode() + b"/runs/run.json"
        else:
            line.is_down = True
            threading.Timer(3, lambda: setattr(line, "is_down", False)).start()
        put()
        assert (line.cuts, line.loses, line.is_down) == (0, b"", False)
    if fault == "it is away":
        assert time.monotonic() - began > 2
        assert len([one for one in caplog.messages if "it is asked until it does" in one]) == 1
    on("b")
    assert contents(folder_of("run").fetched(whole=True)) == RUN | weights


def test_a_stop_while_the_bucket_is_away_leaves_what_is_new_on_this_machine(
    on: Machine, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with suppress(KeyboardInterrupt), (run := folder_of("run")).stored() as put:
        write(run, RUN)
        put()
        write(run, {"spans/two.parquet": "2"})
        line.is_down = True
        raise KeyboardInterrupt
    assert time.monotonic() - began < 10
    assert f"What is not there yet stays in {run.path}" in caplog.text
    line.is_down = False
    with run.stored() as put:
        put()
    on("b")
    assert contents(folder_of("run")) == RUN | {"spans/two.parquet": "2"}


SHIM = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += 7200;
  return failed;
}
"""
ASK = "from ratchet.tasks.storage.run_folder import folder_of as of; of('run')"


@pytest.mark.skipif(shutil.which("cc") is None, reason="the clock is moved by a library in C")
def test_a_clock_that_is_off_is_named(on: Machine, tmp_path: Path) -> None:
    (tmp_path / "ahead.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", tmp_path / "ahead.so", tmp_path / "ahead.c", "-ldl"]
    subprocess.run(command, check=True)
    ahead = {**os.environ, "LD_PRELOAD": str(tmp_path / "ahead.so")}
    asked = subprocess.run(
        [sys.executable, "-c", ASK], env=ahead, stderr=subprocess.PIPE, text=True
    )
    assert "(403 RequestTimeTooSkewed); set the clock of this machine" in asked.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_SECRET_ACCESS_KEY", "another-secret", "403 SignatureDoesNotMatch.; mend the key in"),
        ("AWS_ACCESS_KEY_ID", "AKIDNOBODY", "403 InvalidAccessKeyId.; mend the key in the env"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "does not answer; look at its server and at"),
        ("AWS_ENDPOINT_URL", "http://store.example", "is plain HTTP to store.example, by which k"),
        ("RATCHET_RUNS", "ftp://team/runs", "is not the address of an object store; give s3://"),
        ("RATCHET_RUNS", "s3://key:secret@team/runs", "no key in it, or the path of a folder"),
        ("RATCHET_RUNS", "az://team/runs", "cannot be opened: Account must be specified; mend it"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_in_a_sentence_without_a_secret(
    on: Machine, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    for ask in (all_runs, lambda: folder_of("a")):
        with pytest.raises(UserError, match=re.escape(said).replace(r"\.", ".")) as refusal:
            ask()
        for secret in (KEYS["secretKey"], "another-secret", "key:secret"):
            assert secret not in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "made", "said"),
    [
        ("runs/run.json", '{"files": {"../x": []}}', "is not the index of a run; restore it"),
        ("runs/run.json", '{"files": {"/x": []}}', "is not the index of a run; restore it"),
        ("runs/run.json", f'{{"files": {{"x": [["{"0" * 64}", 1]]}}}}', "a part of x .* is gone"),
        (f"objects/{sha256(b'sealed').hexdigest()}", "Sealed", "a part of spans/one.* is damaged"),
    ],
)
def test_what_strangers_have_put_is_refused_and_written_nowhere_else(
    on: Machine, key: str, made: str, said: str
) -> None:
    keep("run", RUN)
    at = bucket.open_bucket(os.environ["RATCHET_RUNS"])
    at.replace(key, made.encode(), (at.get(key) or (b"", {}))[1])
    on("b")
    with pytest.raises(StoreError, match=said):
        folder_of("run")
    assert not (runs_root().parent / "x").exists()


def test_a_snapshot_has_what_its_files_were_made_of(tmp_path: Path) -> None:
    """A journal is written before its batch is sealed: none is sealed in a listing without it."""
    run, stop = RunFolder(tmp_path / "run"), threading.Event()

    def seal_batches() -> None:
        for number in range(100_000):
            if stop.is_set():
                return
            write(run, {f"journal/{number}.jsonl": "1\n"})
            write(run, {f"spans/{number}.parquet": "1"})
            time.sleep(0.001)

    sealing = threading.Thread(target=seal_batches)
    sealing.start()
    try:
        for _ in range(50):
            found = mirror.snapshot(run.path)
            sealed = {Path(path).stem for path in found if path.startswith("spans")}
            assert sealed == {Path(path).stem for path in found if path.startswith("journal")}
    finally:
        stop.set()
        sealing.join()
