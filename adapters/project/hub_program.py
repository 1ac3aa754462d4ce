"""The program that finds a dataset of the hub: its name as JSON in, its folder or an error out."""

import json
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError


def main() -> None:
    wanted = json.loads(sys.argv[1])
    try:
        said = {"folder": str(find_folder(wanted["id"], wanted["folder"], wanted["revision"]))}
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        said = {"error": str(error).strip().splitlines()[0]}
    print(json.dumps(said))  # noqa: T201


def find_folder(name: str, folder: str | None, revision: str | None) -> Path:
    """Return the folder of a dataset's files in the cache; fetch what is missing of them.

    Folders within the folder are left where they are.
    """
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
