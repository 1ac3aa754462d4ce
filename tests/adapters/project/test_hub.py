"""Datasets of the hub, found by its own library in a cache that is laid out as the library does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.project.hub import locate_dataset
from ratchet.tasks.examples.reading import read_examples
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe

COMMIT, OLDER = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an owner's dataset in an empty cache; its name is the test's own."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hf" / "hub" / f"datasets--owner--{tmp_path.name}"


def cached(hub: Path, commit: str, *references: str, first: int = 0) -> str:
    """Write a snapshot with a split of two files and one of one, and return the dataset's name."""
    folder = hub / "snapshots" / commit / "main"
    folder.mkdir(parents=True)
    for part in range(2):
        table = pa.table({"n": [first + part]})
        pq.write_table(table, folder / f"train-0000{part}-of-00002.parquet")
    pq.write_table(pa.table({"n": [9]}), folder / "test-00000-of-00001.parquet")
    for reference in references:
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / reference).write_text(commit)
    return f"hub:owner/{hub.name.removeprefix('datasets--owner--')}"


def values(name: str, split: str = "train") -> list[int]:
    return [row["example"]["n"] for row in read_examples(locate_dataset(name), split)]


def test_a_cached_dataset_is_read_without_a_network(hub: Path) -> None:
    name = cached(hub, COMMIT, "main")
    assert values(f"{name}/main") == [0, 1]
    assert values(f"{name}/main", "test") == [9]


def test_a_revision_may_be_a_branch_or_a_commit(hub: Path) -> None:
    name = cached(hub, COMMIT, "main")
    cached(hub, OLDER, "old", first=5)
    assert values(f"{name}/main@old") == values(f"{name}/main@{OLDER}") == [5, 6]
    assert values(f"{name}/main@{COMMIT}") == values(f"{name}/main") == [0, 1]


def test_a_run_has_a_checksum_of_a_dataset_s_files(hub: Path, tmp_path: Path) -> None:
    name = cached(hub, COMMIT, "main")
    cached(hub, OLDER, first=5)
    sums = list[str]()
    for path in (f"{name}/main", f"{name}/main@{COMMIT}", f"{name}/main@{OLDER}"):
        recipe = small_recipe(agent="gem:any", dataset={"path": path})
        sums.append(recipe.checksums(RunFolder(tmp_path))[path])
    assert sums[0] == sums[1] != sums[2]


def test_a_dataset_that_is_neither_cached_nor_reachable_is_refused_in_a_sentence(hub: Path) -> None:
    with pytest.raises(UserError) as refused:
        locate_dataset("hub:owner/absent/main@v1")
    said = str(refused.value)
    assert said.startswith("the dataset hub:owner/absent/main@v1 is not in the hub's cache, and ")
    assert "offline mode is enabled" in said or "HF_HUB_OFFLINE" in said
    assert "`hf download owner/absent --repo-type dataset --revision v1`" in said
    assert "\n" not in said


def test_a_folder_that_is_not_cached_is_refused(hub: Path) -> None:
    name = cached(hub, COMMIT, "main")
    with pytest.raises(UserError, match="it has no folder socratic"):
        locate_dataset(f"{name}/socratic")


def test_what_the_cache_lacks_is_fetched_once(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"main/{split}.jsonl": b'{"n": 7}\n' for split in ("train", "test")}
    name = f"owner/{hub.name.removeprefix('datasets--owner--')}"
    with stand_in_hub(name, files | {"README.md": b"", "main/more/big.jsonl": b""}) as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "120")
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "120")
        folder = locate_dataset(f"hub:{name}/main")
        assert values(f"hub:{name}/main") == values(f"hub:{name}/main", "test") == [7]
        fetched = {path for path in asked if "/resolve/" in path}
        assert fetched == {f"/datasets/{name}/resolve/{COMMIT}/{path}" for path in files}
        asked.clear()
        assert locate_dataset(f"hub:{name}/main/") == folder
        assert asked == [], "the cache has it"


@contextmanager
def stand_in_hub(name: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one dataset by the hub's HTTP API; yield the URL and the paths that are asked for."""
    asked: list[str] = []
    tree = [
        {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
        for path, content in files.items()
    ]
    answers = {
        f"/api/datasets/{name}/revision/main": json.dumps({"id": name, "sha": COMMIT}).encode(),
        f"/api/datasets/{name}/tree/{COMMIT}": json.dumps(tree).encode(),
    }
    answers |= {
        f"/datasets/{name}/resolve/{COMMIT}/{path}": content for path, content in files.items()
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            content = answers.get(path, b"")
            self.send_response(200 if path in answers else 404)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", sha1(content).hexdigest())
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
