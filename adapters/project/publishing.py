"""Folders that are pushed to Hugging Face's hub as models, by its own client."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratchet.adapters.errors import UserError
from ratchet.adapters.project.hub import HUB, HubError, answer_aside, ask_aside

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

    HubError if the hub refuses, or cannot be reached.
    """
    asked = {"folder": str(folder), "model": model, "message": message}
    online = {name: value for name, value in os.environ.items() if name != OFFLINE}
    said = ask_aside(__name__, asked, online)
    if "error" in said:
        raise HubError(
            f"{folder} is written, and cannot be pushed to {model}: {said['error'].rstrip('.')}; "
            "log in by `hf auth login` or set HF_TOKEN to a token that may write, and push it by "
            f"`hf upload {model} {folder}`"
        )
    return said["page"]


def main() -> None:
    """Push what the argument says, and answer with the page's address."""
    from httpx2 import HTTPError  # of which the client's own errors are some
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    def answer(asked: Mapping[str, Any]) -> Mapping[str, str]:
        hub = HfApi()
        made = hub.create_repo(asked["model"], private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=asked["model"], folder_path=asked["folder"], commit_message=asked["message"]
        )
        return {"page": str(made)}

    answer_aside(answer, (HTTPError, LocalTokenNotFoundError, OSError, ValueError))


if __name__ == "__main__":
    main()
