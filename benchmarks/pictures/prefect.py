"""Pictures of a server's pages for docs/prefect.md: `python -m benchmarks.pictures.prefect RUN`.

Chromium draws the pages of a run that the server at PREFECT_API_URL knows: its flow run, and its
artifacts.
"""

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from PIL import Image
from prefect.settings import PREFECT_API_URL

from benchmarks.pictures.board import COLOURS, PICTURES
from flows.server.interface import find_interface
from tasks.tracking.prefect_pages import TRAINING_ARTIFACTS, artifact_key

WIDTH, HEIGHT = 1400, 1000
LOADING_MILLISECONDS = 15_000
"""Time, of the browser's own clock, in which a page asks the server for what it shows."""


def pages_of(run: str, url: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each picture, and the address of its page."""
    asked = {"flow_runs": {"name": {"any_": [run]}}, "sort": "START_TIME_DESC"}
    found = httpx.post(f"{url}/flow_runs/filter", json=asked).raise_for_status().json()
    if not found:
        raise SystemExit(f"the server at {url} has no flow run {run}; train one by a deployment")
    if (interface := find_interface(url)) is None:
        raise SystemExit(f"the server at {url} does not tell where its interface is")
    yield "runs", f"{interface}/runs"
    yield "run", f"{interface}/runs/flow-run/{found[0]['id']}"
    for what in TRAINING_ARTIFACTS:
        wanted = {"artifacts": {"key": {"any_": [artifact_key(run, what)]}}}
        [latest] = httpx.post(f"{url}/artifacts/latest/filter", json=wanted).json()
        yield what, f"{interface}/artifacts/artifact/{latest['latest_id']}"


def draw(address: str, picture: Path) -> None:
    """Draw a page, once it has loaded what it shows."""
    with TemporaryDirectory() as folder:
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--virtual-time-budget={LOADING_MILLISECONDS}", f"--user-data-dir={folder}/p"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={folder}/drawn.png", address]
        subprocess.run(command, check=True, capture_output=True)
        drawn = Image.open(f"{folder}/drawn.png").convert("RGB")
        drawn.quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Draw the pages of a run."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", help="name of a run that a deployment has trained")
    options.add_argument("--prefix", default="prefect", help="beginning of the pictures' names")
    arguments = options.parse_args()
    for name, address in pages_of(arguments.run, PREFECT_API_URL.value() or ""):
        picture = PICTURES / f"{arguments.prefix}_{name}.png"
        draw(address, picture)
        print(picture)


if __name__ == "__main__":
    main()
