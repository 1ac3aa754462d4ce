"""What fills a place: a template, and the files, the folder or the commit of its example."""

import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath
from threading import Lock

from ratchet.adapters.calls import Example
from ratchet.adapters.places.place import HOME, TESTS, WORK, Place, PlaceError
from ratchet.adapters.player_protocol import Failure, Outcome
from ratchet.adapters.project.modules import locate
from ratchet.adapters.redaction import quote
from ratchet.durable.files import appearing_folder

TEXTS, FOLDER, REPOSITORY, COMMIT = "files", "folder", "repository", "commit"
"""Columns of an example that say what its place holds."""

PATCH = ("diff ", "--- ")
"""Beginnings of tests that are a patch."""

FILLED_IN = ".template"
"""Ending of a template's file in which `${NAME}` is filled in; the place's file lacks it."""

COMMITS = ".sources"
"""Folder beside the places with the commits that fill them."""

UPLOAD = "git -c uploadpack.allowAnySHA1InWant=true -c uploadpack.allowTipSHA1InWant=true"

log = logging.getLogger(__name__)
_fetching = Lock()


def fill(place: Place, variables: Mapping[str, str]) -> None:
    """Make a place; whatever an earlier attempt has left there is removed."""
    empty(place)
    place.folder.mkdir(parents=True, mode=0o700)  # a program may leave files that are setuid
    for folder in (place.work, place.home, place.temporary):
        folder.mkdir()
    if place.settings.template is not None:
        _copy_template(place, locate(Path(place.settings.template)), variables)
    example = place.example
    if FOLDER in example:
        _copy_folder(_existing(str(example[FOLDER]), FOLDER), place.work)
    if REPOSITORY in example:
        _copy_folder(_committed(place, example), place.work)
    for path, content in _files_of(example.get(TEXTS, {}), TEXTS):
        lay(place.work, path, content)


def leave(place: Place, outcome: Outcome | None) -> None:
    """Remove a place, unless the recipe keeps the place of a rollout that has this outcome.

    A rollout without an outcome is played again.
    """
    kept = place.settings.kept
    if outcome is None or not (
        kept == "always" or (kept == "failed" and isinstance(outcome, Failure))
    ):
        try:
            empty(place)
        except PlaceError as error:
            log.warning("%s", error)


def empty(place: Place) -> None:
    """Remove a place, whatever its program has made of it; PlaceError if the system refuses."""
    if place.folder.exists():
        _remove(place.folder)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # locked folders, or more of them than Python can descend
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], capture_output=True)
        ended = subprocess.run(["rm", "-rf", "--", folder], capture_output=True)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip()
            raise PlaceError(f"the place {folder} cannot be removed: {said}; remove it") from None


def folders_of(example: Example) -> list[str]:
    """List the folders of the project that fill an example's place, or have its tests."""
    named = [example.get(FOLDER), example.get(TESTS)]
    return [one for one in named if isinstance(one, str) and not one.startswith(PATCH)]


def lay_tests(place: Place) -> str | None:
    """Lay the files of the column `tests` into a place, or return the patch that it holds."""
    tests = place.example.get(TESTS)
    if isinstance(tests, str) and tests.startswith(PATCH):
        return tests
    if isinstance(tests, str):
        folder = _existing(tests, TESTS)
        for path in _walk(folder):
            lay(place.work, str(path.relative_to(folder)), path.read_bytes(), path.stat().st_mode)
    elif tests is not None:
        for name, content in _files_of(tests, TESTS):
            lay(place.work, name, content)
    return None


def lay(root: Path, name: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file below `root`, where a program may have put anything: no link is followed."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise PlaceError(f"the file {name!r} is not inside the place; give a relative path")
    folder = root
    for part in path.parts[:-1]:
        folder /= part
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir()
    target = folder / path.name
    if target.is_dir() and not target.is_symlink():
        _remove(target)
    target.unlink(missing_ok=True)  # it may be a link to a file elsewhere
    target.write_bytes(content)
    target.chmod(stat.S_IMODE(mode))


def _files_of(files: object, column: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a column by their names; PlaceError if it holds something else.

    Null is no file: in Parquet the objects of all rows have the same names.
    """
    if not isinstance(files, Mapping):
        raise PlaceError(
            f"the column {column!r} is {quote(files)}; give an object of texts by path"
        )
    for name, text in files.items():
        if not isinstance(text, str | None):
            raise PlaceError(f"the file {name!r} of the column {column!r} is no text; give one")
        if text is not None:
            yield str(name), text.encode()


def _copy_template(place: Place, template: Path, variables: Mapping[str, str]) -> None:
    """Copy a template's `work` and `home`, and fill in the files that ask for it."""
    if not any((template / name).is_dir() for name in (WORK, HOME)):
        raise PlaceError(
            f"the template {template} has no folder {WORK!r} and none {HOME!r}; give it one, with "
            "what each rollout's program finds there"
        )
    for name, target in ((WORK, place.work), (HOME, place.home)):
        if (source := template / name).is_dir():
            _copy_folder(source, target)
            for path in _walk(target):
                if path.name.endswith(FILLED_IN):
                    text = place.fill_in(path.read_text(encoding="utf-8"), variables, str(path))
                    path.with_name(path.name.removesuffix(FILLED_IN)).write_text(
                        text, encoding="utf-8"
                    )
                    path.unlink()


def _copy_folder(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without following links."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def _existing(name: str, column: str) -> Path:
    folder = locate(Path(name))
    if not folder.is_dir():
        raise PlaceError(f"the column {column!r} names the folder {name}, which does not exist")
    return folder


def _committed(place: Place, example: Example) -> Path:
    """Return a folder with a commit of a repository, and nothing of what came after it."""
    repository, commit = str(example[REPOSITORY]), str(example.get(COMMIT, "HEAD"))
    name = sha256(f"{repository}\0{commit}".encode()).hexdigest()[:24]
    folder = Path(place.settings.folder) / COMMITS / name
    local = locate(Path(repository))
    source = str(local.resolve()) if local.exists() else repository
    with _fetching:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with appearing_folder(folder) as made:
                upload = f"--upload-pack={UPLOAD} upload-pack"
                _git(made, "init", "--quiet")
                _git(made, "fetch", "--quiet", "--depth=1", upload, "--", source, commit)
                _git(made, "checkout", "--quiet", "-B", "main", "FETCH_HEAD")
    return folder


def _git(folder: Path, *words: str) -> None:
    ended = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    if ended.returncode:
        raise PlaceError(
            f"git {words[0]} ended with exit status {ended.returncode}: {ended.stderr.strip()}; "
            f"mend the columns {REPOSITORY!r} and {COMMIT!r} of the example"
        )
