"""The preparation of a GGUF file: one at a time, and what a killed one has left is deleted."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ratchet.durable.files import PARTIAL
from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.base_models import LOCK, prepare_gguf
from tests.support.gguf_models import write_gguf

LIMIT_SECONDS = 120


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf")[0]


def prepare(file: Path, cache: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ratchet.engine", "--prepare", "--base-model", str(file)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda whole: whole[:8], r"model\.gguf is cut short or damaged \("),
        (
            lambda whole: whole.replace(b"llama", b"lemur"),
            "has the architecture 'lemur', which transformers does not read",
        ),
    ],
    ids=["header cut", "foreign"],
)
def test_a_file_that_cannot_be_read_is_refused_before_anything_is_written(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[bytes], bytes],
    said: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(RequestRefused, match=said):
        prepare_gguf(file)
    assert not (tmp_path / "cache").exists()


def header(*values: tuple[str, int], tensors: int = 0, fields: int = 1) -> bytes:
    """Return a GGUF header with one field `k`, whose value is packed as given."""
    counts = struct.pack("<4sIQQQ1s", b"GGUF", 3, tensors, fields, 1, b"k")
    return counts + b"".join(struct.pack(f"<{kind}", value) for kind, value in values)


@pytest.mark.parametrize(
    "data",
    [
        header(("I", 9), ("I", 4), ("Q", 2**50)),
        header(("I", 9), ("I", 8), ("Q", 2**50)),
        header(("I", 8), ("Q", 2**50)),
        header(("I", 99)),
        header(("I", 4), ("I", 1), fields=2**50),
        header(("I", 4), ("I", 1), tensors=2**50),
    ],
    ids=["numbers", "texts", "text", "kind", "fields", "tensors"],
)
def test_counts_that_the_file_has_not_the_bytes_for_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(data + b"\0" * 64)
    with pytest.raises(RequestRefused, match=r"a\.gguf is cut short or damaged \("):
        prepare_gguf(tmp_path / "a.gguf")


def test_a_preparation_waits_for_a_living_one_and_deletes_what_a_killed_one_has_left(
    file: Path, tmp_path: Path
) -> None:
    bases = tmp_path / "ratchet" / "bases"
    with prepare(file, tmp_path) as first:
        wait_for(lambda: any(bases.glob(f".*{PARTIAL}/*")))
        first.send_signal(signal.SIGSTOP)
        [unfinished] = bases.glob(f".*{PARTIAL}")
        begun = {*unfinished.iterdir()}
        with prepare(file, tmp_path) as second:
            opened = psutil.Process(second.pid).open_files
            wait_for(lambda: any(Path(one.path).name == LOCK for one in opened()))
            time.sleep(0.5)
            assert second.poll() is None
            assert begun <= {*unfinished.iterdir()}
            first.kill()
            out, err = second.communicate(timeout=LIMIT_SECONDS)
    assert second.returncode == 0, err
    assert {path.name for path in bases.iterdir()} == {LOCK, Path(out.strip()).name}
