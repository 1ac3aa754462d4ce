"""Datasets by name: a path, or a folder of a dataset on Hugging Face's hub, in the hub's cache.

A name such as `hub:openai/gsm8k/main@REVISION` has a dataset's id, the folder of its files, and a
revision; folder and revision may be left out. What the cache has is used as it is, so that a run
goes on with the rows with which it began; only what is missing is fetched.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratchet.adapters.errors import UserError
from ratchet.adapters.project.modules import locate

HUB = "hub:"
DATASET_NAME = re.compile(r"(?P<id>[^/@]+/[^/@]+)(/(?P<folder>[^@]+?))?/?(@(?P<revision>\S+))?")


class HubError(UserError):
    """Refusal of a dataset that the hub does not have, or that cannot be fetched from it."""


def locate_dataset(name: str) -> Path:
    """Return the path of a dataset, which is fetched if its name is of the hub and not cached.

    A path is a file of the working folder, or else an example of Ratchet's. HubError if the name is
    malformed, or the dataset is neither cached nor reachable.
    """
    return _fetch(name) if name.startswith(HUB) else locate(Path(name))


@lru_cache(maxsize=8)
def _fetch(name: str) -> Path:
    named = DATASET_NAME.fullmatch(name.removeprefix(HUB))
    if named is None:
        raise HubError(
            f"{name} names no dataset of the hub: write it as hub:OWNER/NAME or "
            "hub:OWNER/NAME/FOLDER, with @REVISION behind it if need be"
        )
    wanted = named.groupdict()
    found = ask_aside(__name__, wanted)
    if "error" in found:
        options = f" --revision {wanted['revision']}" if wanted["revision"] else ""
        raise HubError(
            f"the dataset {name} is not in the hub's cache, and cannot be fetched: "
            f"{found['error'].rstrip('.')}; check the name, fetch it where there is a network by "
            f"`hf download {wanted['id']} --repo-type dataset{options}`, or give the path of a "
            "folder that holds its files"
        )
    return Path(found["folder"])


def ask_aside(
    module: str, asked: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the answer of a module that calls `answer_aside`, or an `error`.

    It runs in a process of its own, since a run switches this one's hub library offline.
    """
    command = [sys.executable, "-P", "-m", module, json.dumps(asked)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    lines = ended.stdout.splitlines() or ['{"error": "the program that asks the hub failed"}']
    return json.loads(lines[-1])


def answer_aside(
    answer: Callable[[Mapping[str, Any]], Mapping[str, str]], errors: tuple[type[Exception], ...]
) -> None:
    """Print the answer to what the argument asks, both as JSON; one of `errors` is an answer."""
    try:
        said = answer(json.loads(sys.argv[1]))
    except errors as error:
        said = {"error": str(error).strip().splitlines()[0]}
    print(json.dumps(said))  # noqa: T201


def main() -> None:
    """Find the dataset that the argument names."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def answer(wanted: Mapping[str, Any]) -> Mapping[str, str]:
        return {"folder": str(find_folder(wanted["id"], wanted["folder"], wanted["revision"]))}

    answer_aside(answer, (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError))


def find_folder(name: str, folder: str | None, revision: str | None) -> Path:
    """Return the folder of a dataset's files in the cache; fetch what is missing of them.

    Folders within the folder are left where they are.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    prefix = f"{folder}/" if folder else ""

    def find(*, in_cache: bool) -> Path:
        snapshot = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=f"{prefix}*",
            ignore_patterns=f"{prefix}*/*",
            local_files_only=in_cache,
        )
        if not (Path(snapshot) / prefix).is_dir():
            raise LocalEntryNotFoundError(f"it has no folder {folder}")
        return Path(snapshot) / prefix

    try:
        return find(in_cache=True)
    except LocalEntryNotFoundError:
        return find(in_cache=False)


if __name__ == "__main__":
    main()
