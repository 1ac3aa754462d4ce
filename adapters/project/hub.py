"""Hugging Face's hub: datasets by name, in the hub's cache, and folders that are pushed as models.

A dataset's name such as `hub:openai/gsm8k/main@REVISION` has its id, the folder of its files, and a
revision; folder and revision may be left out. What the cache has is used as it is, so that a run
goes on with the rows with which it began; only what is missing is fetched.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratchet.adapters.errors import UserError
from ratchet.adapters.project.modules import locate

HUB = "hub:"
DATASET_NAME = re.compile(r"(?P<id>[^/@]+/[^/@]+)(/(?P<folder>[^@]+?))?/?(@(?P<revision>\S+))?")
OFFLINE = "HF_HUB_OFFLINE"


def locate_dataset(name: str) -> Path:
    """Return the path of a dataset, which is fetched if its name is of the hub and not cached.

    A path is a file of the working folder, or else an example of Ratchet's. UserError if the name
    is malformed, or the dataset is neither cached nor reachable.
    """
    return _fetch(name) if name.startswith(HUB) else locate(Path(name))


@lru_cache(maxsize=8)
def _fetch(name: str) -> Path:
    named = DATASET_NAME.fullmatch(name.removeprefix(HUB))
    if named is None:
        raise UserError(
            f"{name} names no dataset of the hub: write it as hub:OWNER/NAME or "
            "hub:OWNER/NAME/FOLDER, with @REVISION behind it if need be"
        )
    wanted = named.groupdict()
    found = _ask_aside("find", wanted)
    if "error" in found:
        options = f" --revision {wanted['revision']}" if wanted["revision"] else ""
        raise UserError(
            f"the dataset {name} is not in the hub's cache, and cannot be fetched: "
            f"{found['error'].rstrip('.')}; check the name, fetch it where there is a network by "
            f"`hf download {wanted['id']} --repo-type dataset{options}`, or give the path of a "
            "folder that holds its files"
        )
    return Path(found["answer"])


def check_push(name: str) -> str:
    """Return the model that `hub:OWNER/NAME` names; UserError for another name, or if offline."""
    model = name.removeprefix(HUB)
    if not name.startswith(HUB) or model.count("/") != 1 or not all(model.split("/")):
        raise UserError(f"{name!r} names no model of the hub: give --push hub:OWNER/NAME")
    if os.environ.get(OFFLINE) not in (None, "", "0"):
        raise UserError(
            f"--push needs the hub, and {OFFLINE} is set; unset it, or leave --push out"
        )
    return model


def push(folder: Path, model: str, message: str) -> str:
    """Push a folder as a commit of a model, made private if it is new; return the page's address.

    UserError if the hub refuses, or cannot be reached.
    """
    asked = {"folder": str(folder), "model": model, "message": message}
    online = {name: value for name, value in os.environ.items() if name != OFFLINE}
    said = _ask_aside("push", asked, online)
    if "error" in said:
        raise UserError(
            f"{folder} is written, and cannot be pushed to {model}: {said['error'].rstrip('.')}; "
            "log in by `hf auth login` or set HF_TOKEN to a token that may write, and push it by "
            f"`hf upload {model} {folder}`"
        )
    return said["answer"]


def _ask_aside(
    what: str, asked: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the `answer` of this module's program, or an `error`.

    It runs in a process of its own, since a run switches this one's hub library offline.
    """
    command = [sys.executable, "-P", "-m", __name__, what, json.dumps(asked)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    lines = ended.stdout.splitlines() or ['{"error": "the program that asks the hub failed"}']
    return json.loads(lines[-1])


def main(what: str, asked: str) -> None:
    """Find or push what the arguments say, and print the answer or the error as JSON."""
    from httpx2 import HTTPError  # of which the client's own errors are some
    from huggingface_hub.errors import LocalEntryNotFoundError, LocalTokenNotFoundError

    ours = HTTPError, LocalEntryNotFoundError, LocalTokenNotFoundError, OSError, ValueError
    try:
        said = {"answer": {"find": find_folder, "push": push_folder}[what](**json.loads(asked))}
    except ours as error:
        said = {"error": str(error).strip().splitlines()[0]}
    print(json.dumps(said))  # noqa: T201


def push_folder(folder: str, model: str, message: str) -> str:
    """Push a folder by the hub's own client; return the page's address."""
    from huggingface_hub import HfApi

    made = HfApi().create_repo(model, private=True, exist_ok=True)
    HfApi().upload_folder(repo_id=model, folder_path=folder, commit_message=message)
    return str(made)


def find_folder(id: str, folder: str | None, revision: str | None) -> str:
    """Return the folder of a dataset's files in the cache; fetch what is missing of them.

    Folders within the folder are left where they are.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    prefix = f"{folder}/" if folder else ""

    def find(*, in_cache: bool) -> str:
        snapshot = snapshot_download(
            id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=f"{prefix}*",
            ignore_patterns=f"{prefix}*/*",
            local_files_only=in_cache,
        )
        if not (Path(snapshot) / prefix).is_dir():
            raise LocalEntryNotFoundError(f"it has no folder {folder}")
        return str(Path(snapshot) / prefix)

    try:
        return find(in_cache=True)
    except LocalEntryNotFoundError:
        return find(in_cache=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
