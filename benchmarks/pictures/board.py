"""Pictures of the board for docs/watching.md: `python -m benchmarks.pictures.board`.

Chromium draws the board's first page over the runs in RATCHET_RUNS, at the width of a desk and of a
telephone.
"""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from PIL import Image

from flows.server.board import serve_board

PICTURES = Path("docs/pictures")
SIZES = {"board.png": (1440, 800), "board-narrow.png": (400, 1400)}
"""Picture → its width and height in pixels."""
NARROWEST = 500
"""Pixels of Chromium's narrowest window; a narrower page is a frame in it."""
COLOURS = 128


def draw(page: str, width: int, height: int, picture: Path) -> None:
    """Draw the begin of a page as it is `width` pixels wide."""
    frame = f'<body style="margin: 0"><iframe src="page.html" width="{width}" height="{height}"'
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "page.html").write_text(page, encoding="utf-8")
        (path / "frame.html").write_text(f'{frame} style="border: 0"></iframe>', encoding="utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--screenshot={path}/drawn.png", f"--user-data-dir={path}/profile"]
        command += [f"--window-size={max(width, NARROWEST)},{height}", f"file://{path}/frame.html"]
        subprocess.run(command, check=True, capture_output=True)
        drawn = Image.open(path / "drawn.png").convert("RGB").crop((0, 0, width, height))
        drawn.quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Draw the pictures of SIZES."""
    with serve_board() as address, httpx.Client(follow_redirects=True, timeout=60) as browser:
        page = browser.get(address).raise_for_status().text
    for name, (width, height) in SIZES.items():
        draw(page, width, height, PICTURES / name)
        print(PICTURES / name)


if __name__ == "__main__":
    main()
