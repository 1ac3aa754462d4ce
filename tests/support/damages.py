"""Damages that a disk, a copy or a hand does to a file, by what they are called."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

RUBBISH = b'not { what was "written" \x00\xff\n' * 3


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    _write(path, bytes(data))


def truncate(path: Path) -> None:
    """Cut a file off in the middle of a line: a log without its last lines is an earlier log."""
    _write(path, path.read_bytes()[: path.stat().st_size // 2].removesuffix(b"\n"))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def delete_the_folder(path: Path) -> None:
    """Delete the folder of a file, with all that it has."""
    shutil.rmtree(path.parent)


def _write(path: Path, data: bytes) -> None:
    path.unlink()  # it may be shared with another folder by a hard link
    path.write_bytes(data)


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "a bit flips": flip,
    "its end is cut off": truncate,
    "it is empty": lambda path: _write(path, b""),
    "it is rubbish": lambda path: _write(path, RUBBISH),
    "it is deleted": Path.unlink,
    "a folder is in its place": replace_by_a_folder,
    "a dangling link is in its place": replace_by_a_dangling_link,
}
