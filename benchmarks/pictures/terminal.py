"""Pictures for docs/watching.md of a terminal: `python -m benchmarks.pictures.terminal`.

Hello is trained in a folder of its own, by the real commands, in terminals of 100 columns. What a
terminal shows is read by pyte, and drawn as SVG by rich.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory

import pyte
from rich.console import Console
from rich.text import Text

PICTURES = Path("docs/pictures").absolute()
RATCHET = (sys.executable, "-m", "ratchet.flows.cli.main")
ROOT = Path(__file__).parents[2]
COLUMNS, ROWS = 100, 60
RUN = "hello-1"
SEEN = "held-out"
"""What a watch shows once a run has something to show."""


class Terminal:
    """A terminal of so many columns, with one command in it."""

    def __init__(self, command: Sequence[str], folder: Path, columns: int = COLUMNS) -> None:
        self._screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=variables
        )
        os.close(theirs)

    def lines(self) -> list[str]:
        """Return what the terminal shows."""
        return [line.rstrip() for line in self._screen.display]

    def read_until(self, seen: Callable[[], bool]) -> None:
        """Read what the command writes until `seen`, or until the command has ended."""
        while not seen():
            ready, _, _ = select([self._ours], [], [], 0.2)
            if not ready:
                continue
            try:
                self._stream.feed(os.read(self._ours, 4096))
            except OSError:  # the command has ended
                self.process.wait()
                return

    def draw(self, title: str, picture: Path) -> None:
        """Draw what the terminal shows, without the empty lines at its end."""
        text = "\n".join(self.lines()).strip("\n")
        console = Console(record=True, width=self._screen.columns, file=StringIO())
        console.print(Text(text), soft_wrap=True)
        picture.write_text(console.export_svg(title=title), encoding="utf-8")


def draw_training(folder: Path) -> None:
    """Draw a training of hello, a watch of it from another terminal, and its last words."""
    words = [*RATCHET, "train", "hello", "--run", RUN]
    terminal = Terminal(words, folder)
    metrics = Path(os.environ["RATCHET_RUNS"]) / RUN / "metrics.jsonl"
    terminal.read_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
    watch = Terminal([*RATCHET, "watch", RUN], folder)
    began = time.monotonic()
    watch.read_until(
        lambda: time.monotonic() - began > 3 and any(SEEN in line for line in watch.lines())
    )
    watch.draw(f"ratchet watch {RUN}", PICTURES / "watch.svg")
    watch.process.terminate()
    watch.process.wait()
    terminal.read_until(lambda: False)
    terminal.draw("ratchet train hello", PICTURES / "last-words-100.svg")
    for command in (f"fork {RUN} --at 15 --run fork-1 --set steps=17", "runs"):
        terminal = Terminal([*RATCHET, *command.split()], folder)
        terminal.read_until(lambda: False)
    terminal.draw("ratchet runs", PICTURES / "runs.svg")


def main() -> None:
    """Draw every picture."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"RATCHET_RUNS": f"{name}/runs", "PREFECT_HOME": f"{name}/prefect"}
        draw_training(folder)


if __name__ == "__main__":
    main()
