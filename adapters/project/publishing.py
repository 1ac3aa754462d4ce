"""Folders that are pushed to Hugging Face's hub as models, by its own client."""

import json
import os
import subprocess
import sys
from pathlib import Path

from adapters.errors import UserError
from adapters.project.hub import HUB, HubError

OFFLINE = "HF_HUB_OFFLINE"


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

    HubError if the hub refuses, or cannot be reached. It runs in a process of its own, since a run
    switches this one's hub library offline.
    """
    told = json.dumps({"folder": str(folder), "model": model, "message": message})
    environment = {name: value for name, value in os.environ.items() if name != OFFLINE}
    command = [sys.executable, "-P", "-m", __name__, told]
    pushed = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=environment
    )
    lines = pushed.stdout.splitlines() or ['{"error": "the program that pushes it failed"}']
    said = json.loads(lines[-1])
    if "error" in said:
        raise HubError(
            f"{folder} is written, and cannot be pushed to {model}: {said['error'].rstrip('.')}; "
            "log in by `hf auth login` or set HF_TOKEN to a token that may write, and push it by "
            f"`hf upload {model} {folder}`"
        )
    return said["page"]


def main() -> None:
    """Push what the argument says, as JSON; print the page's address, or an error, as JSON."""
    from httpx2 import HTTPError  # of which the client's own errors are some
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    asked = json.loads(sys.argv[1])
    hub = HfApi()
    try:
        made = hub.create_repo(asked["model"], private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=asked["model"], folder_path=asked["folder"], commit_message=asked["message"]
        )
        said = {"page": str(made)}
    except (HTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        said = {"error": str(error).strip().splitlines()[0]}
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    main()
