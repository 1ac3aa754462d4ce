"""The project's files and modules: the working folder's, or else Ratchet's examples.

An agent is a file of `agents/`, which is a folder and no package: `import agents` is the OpenAI
Agents SDK where that is installed. The working folder is not on `sys.path`, where any library that
imports `datasets` would find its `datasets/`.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from unicodedata import normalize
from zlib import crc32

from ratchet.adapters.errors import UserError, did_you_mean
from ratchet.durable.process import working_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
"""The folder that holds the examples' agents/, datasets/ and prefect.yaml."""
AGENTS = Path("agents")
PLAY = "play"
"""The function of an agent's file."""

_read: dict[str, str] = {}
"""File of a module → its checksum when this process imported it."""


class AgentError(UserError):
    """An error for a name that no agent has."""


def locate(path: Path) -> Path:
    """Return where a file of the project lies, or of Ratchet's, or where the project's would lie.

    `~` is the user's home, unless something has that name.
    """
    own = path.expanduser() if path.parts[:1] == ("~",) else path
    places = (working_folder() / path, working_folder() / own, EXAMPLES / path)
    return next((found for found in map(_written, places) if found.exists()), places[0])


def _written(path: Path) -> Path:
    """Return a path as it is written on disk: Unicode has two ways to write most accents."""
    if path.exists() or path == path.parent:
        return path
    name = normalize("NFC", path.name)
    folder = _written(path.parent)
    alike = [one for one in folder.glob("*") if normalize("NFC", one.name) == name]
    return alike[0] if len(alike) == 1 else path


def load_agent_file(name: str) -> ModuleType:
    """Load agents/NAME.py of the project; AgentError if there is none."""
    module = _load_file(locate(_file_of(name)))
    if module is None:
        raise no_agent(name)
    return module


def load_module(name: str) -> ModuleType | None:
    """Load agents/NAME.py, or else import the module `name`; None if neither exists.

    An example of Ratchet's comes last, since a module of the user's may have the same name.
    """
    own, carried = (folder / _file_of(name) for folder in (working_folder(), EXAMPLES))
    return _load_file(own) or _import_if_exists(name) or _load_file(carried)


def source_of(module: ModuleType) -> str:
    """Return the SHA-256 of a module's file; AgentError if it was edited since it was read here."""
    file = str(module.__file__)
    source = sha256(Path(file).read_bytes()).hexdigest()
    if _read.setdefault(file, source) != source:
        raise AgentError(
            f"{file} was edited since this process has imported it; start the process anew (in a "
            "notebook, its kernel)"
        )
    return source


def no_agent(name: str) -> AgentError:
    files = [path for root in (working_folder(), EXAMPLES) for path in (root / AGENTS).glob("*.py")]
    playing = f"def {PLAY}("
    known = {file.stem for file in files if playing in file.read_text(encoding="utf-8")}
    return AgentError(
        f"no agent {name!r}; there are: {', '.join(sorted(known))}{did_you_mean(name, known)}"
    )


def _file_of(name: str) -> Path:
    return AGENTS / f"{name}.py"


def _load_file(path: Path) -> ModuleType | None:
    """Load a file under a name of its own, with the modules beside it importable."""
    if not path.is_file():
        return None
    path = path.resolve()
    name = f"agent_{path.stem}_{crc32(bytes(path)):08x}"
    finder = _project_finder()
    finder.files[name] = path
    finder.search(path.parent)
    try:
        return _import(name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise _explain(str(path), error) from error


def _import_if_exists(name: str) -> ModuleType | None:
    """Import a module; None if it does not exist, an error if one of its imports does not."""
    finder = _project_finder()
    finder.named.add(name.partition(".")[0])
    try:
        return _import(name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            return None
        raise _explain(name, error) from error


def _import(name: str) -> ModuleType:
    folder = working_folder()
    try:
        return importlib.import_module(name)
    finally:
        os.chdir(folder)  # from wherever the module has gone


def _explain(name: str, error: BaseException) -> AgentError:
    """Make the error for code that cannot be imported, with the place where it raised."""
    if isinstance(error, SyntaxError):
        reason, file, line = error.msg, error.filename, error.lineno
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason, file, line = " ".join(str(error).split()), last.filename, last.lineno
    return AgentError(
        f"{name} cannot be imported: {type(error).__name__}: {reason} ({file}, line {line}); mend "
        "it, or install what it imports"
    )


class _ProjectFinder(MetaPathFinder):
    """A finder, before all others, of agents' files, modules beside them and the working folder's.

    A folder without `__init__.py` is a package only if its name is in `named`: if a recipe names a
    function of it. As in a script, a module of the working folder comes before an installed one of
    its name; one beside the agents does not, since agents/crewai.py may import crewai.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.named: set[str] = set()
        self.folders = [""]  # of which an empty one is the working folder

    def search(self, folder: Path) -> None:
        """Find modules in a folder too: before those of the working folder, if it is the user's."""
        if str(folder) not in self.folders:
            place = len(self.folders) if folder == (EXAMPLES / AGENTS).resolve() else 0
            self.folders.insert(place, str(folder))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.files:
            return spec_from_file_location(fullname, self.files[fullname])
        if path is not None or fullname in sys.stdlib_module_names or fullname == AGENTS.name:
            return None
        spec = PathFinder.find_spec(fullname, self.folders)
        if spec is None or (spec.loader is None and fullname not in self.named):
            return None
        own = PathFinder.find_spec(fullname, [""])
        is_own = own is not None and own.loader is not None and own.origin == spec.origin
        return spec if is_own else PathFinder.find_spec(fullname) or spec


_FINDER = _ProjectFinder()


def _project_finder() -> _ProjectFinder:
    """Return the finder of this process, which takes part in every import from now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return _FINDER
