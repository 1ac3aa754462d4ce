"""The command `python -m ratchet.engine`: a server of the Tinker API on this machine."""

import argparse
import faulthandler
import gc
import json
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from ratchet.durable.process import collect_garbage, usable_cores
from ratchet.engine.disk import lock_state
from ratchet.engine.errors import RequestRefused
from ratchet.engine.model import base_models

if TYPE_CHECKING:  # torch takes seconds
    from ratchet.engine.model.language_model import LanguageModel

logger = logging.getLogger("engine")

REFUSED = 2
"""Exit status if the command cannot start as asked."""
MOST_THREADS = 4
THREAD_BYTES = 2**32
"""Free memory for each thread: a microbatch of a large model takes three quarters of it."""
DAMAGED = 1
"""Exit status of --verify if a file is damaged."""
INTERRUPTED = 130
READ_FROM_STDIN = "-"
LOG = "engine.log"
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
CLOSED = "closed"
STUCK_SECONDS = 60.0
"""Time after which an engine without a folder ends itself if none of its threads can run: a thread
of a library that dies with the interpreter's lock leaves it so."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve, then end the process at once.

    All kept state is on disk by then, nothing waits for running computations, and a normal exit
    would take a second to tear torch down.
    """
    options = make_parser().parse_args(argv, ServeOptions())
    status = 0
    try:
        if options.verify:
            status = verify(options.state)
        elif options.prepare:
            print(base_models.find(options.base_model).folder)
        elif str(options.state) == READ_FROM_STDIN:
            serve_each(options)
        else:
            serve(options)
    except RequestRefused as error:
        print(f"engine: {error}", file=sys.stderr)
        status = REFUSED
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine",
        description="Serve the Tinker API from this machine, for small models on a CPU, and for "
        "tests; docs/servers.md names servers for GPUs. Prints two export lines when ready.",
        epilog="The key is TINKER_API_KEY where that is set, and random otherwise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(**asdict(ServeOptions()))
    for one in fields(ServeOptions):
        parser.add_argument(f"--{one.name.replace('_', '-')}", **one.metadata)
    return parser


def default_threads() -> int:
    """Return the number of usable cores, as far as there is memory for what each computes."""
    return max(
        1, min(MOST_THREADS, usable_cores(), psutil.virtual_memory().available // THREAD_BYTES)
    )


def option(default: Any, said: str, **known: Any) -> Any:
    """Return the field of an option; one that is False by default is a switch."""
    known |= {"action": "store_true"} if default is False else {}
    made: Any = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"help": said, **known})


@dataclass(slots=True)
class ServeOptions:
    """Options of the command line, and their defaults."""

    base_model: str = option(
        base_models.TINY_CHAT, "a local/ id, a fetched model, a folder, a GGUF file, or a hub name"
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "port to listen on; 0 picks a free one", type=int)
    state: Path = option(  # noqa: RUF009
        lambda: Path("runs/engine"),
        "folder of sessions and checkpoints; with -, each line of standard input is a JSON list of "
        "a base model and a folder, which is served until the next line, with a log, engine.log",
        type=Path,
    )
    threads: int = option(
        default_threads, "microbatches and parts of a sampling step computed at once", type=int
    )
    device: str = option("cpu", "cpu; cuda and mps are not tested")
    dtype: str = option(
        "float32",
        "type of the products of the base model's layers but its head; the rest is float32",
        choices=("float32", "bfloat16"),
    )
    verify: bool = option(False, "list the damaged files of --state, and serve nothing")
    prepare: bool = option(
        False, "download or dequantise the base model, print its folder, and serve nothing"
    )
    exit_with_stdin: bool = option(False, "stop when standard input closes")


def serve(options: ServeOptions, api_key: str | None = None) -> None:
    """Serve until a signal or the end of standard input; without a key use TINKER_API_KEY.

    Raise RequestRefused if the model is missing, or the port or state folder is in use.
    """
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    stopped = threading.Event()
    if options.exit_with_stdin:
        told = partial(_follow_stdin, lambda line: stopped.set() if line is None else None)
        threading.Thread(target=told, daemon=True).start()
    key = resolve_key(api_key or os.environ.get("TINKER_API_KEY"))
    _serve_folder(options, key, stopped, lambda _: _load(options))


def serve_each(options: ServeOptions) -> None:
    """Serve the folders that standard input names, one after the other, until it ends.

    A line ends the serving of the folder before and, unless it is empty, names the next folder and
    its base model. The libraries are loaded before the first line comes, and each model is loaded
    once. A line that says CLOSED follows on standard output when a folder is no longer used.
    """
    orders = Orders()
    threading.Thread(target=_follow_stdin, args=(orders.add,), daemon=True).start()
    _load_libraries()
    key = resolve_key(os.environ.get("TINKER_API_KEY"))
    load = cache(lambda base: _load(replace(options, base_model=base)))
    while (named := orders.next()) is not None:
        base, state = json.loads(named)
        with (Path(state) / LOG).open("ab") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
        of_line = replace(options, base_model=base, state=Path(state))
        if not _serve_folder(of_line, key, orders.stopped, load):
            return  # a computation goes on, which may change what the next one reads
        print(CLOSED, flush=True)


def _serve_folder(
    options: ServeOptions,
    key: str,
    stopped: threading.Event,
    load: "Callable[[str], LanguageModel]",
) -> bool:
    """Serve a folder until the event is set; return whether its computations have ended then."""
    if options.threads < 1:
        raise RequestRefused(f"--threads is {options.threads}; it must be 1 or more")
    base = base_models.find(options.base_model)
    with listen(options.host, options.port) as listener, lock_state(options.state):
        try:
            base_models.add_to_cache(base)
        except OSError as error:  # everything but SamplingClient.get_tokenizer works without it
            logger.warning("no Hugging Face cache entry for %s: %s", base.name, error)
        _load_libraries()
        from ratchet.engine.api.server import Server
        from ratchet.engine.core import EngineCore

        engine = EngineCore(base, load(options.base_model), options.state)
        host, port = listener.getsockname()[:2]
        server = Server(engine, key, stopped, lambda: _announce(host, port, key))
        return server.serve_on(listener)


def _load(options: ServeOptions) -> "LanguageModel":
    from ratchet.engine.api.server import load_model

    base = base_models.find(options.base_model)
    return load_model(base, options.device, options.threads, options.dtype)


class Orders:
    """Lines of standard input; each line ends the serving before it."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Set when what is served now is to be served no longer."""
        self._lines = Queue[str | None]()

    def add(self, line: str | None) -> None:
        """Add a line, or None at the end."""
        self._lines.put(line)
        self.stopped.set()

    def next(self) -> str | None:
        """Wait for the next folder, and have `stopped` be of it; None when there is no more."""
        while (named := self._wait()) == "":
            pass
        self.stopped = threading.Event()
        if not self._lines.empty():
            self.stopped.set()
        return named

    def _wait(self) -> str | None:
        """Wait for a line or the end; a watchdog that needs no lock ends what is stuck."""
        try:
            while True:
                faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
                with suppress(Empty):
                    return self._lines.get(timeout=STUCK_SECONDS / 4)
        finally:
            faulthandler.cancel_dump_traceback_later()


def verify(state: Path) -> int:
    """Print the damaged files of a state folder, one a line; return the exit status."""
    from ratchet.engine.state.registry import find_damaged_state  # torch takes seconds

    damaged = find_damaged_state(state)
    for path in damaged:
        print(path)
    return DAMAGED if damaged else 0


def _load_libraries() -> None:
    """Import torch and transformers, which takes seconds that `--help` should not wait for.

    A fifth of them would be the garbage collector's, which looks for garbage among the modules.
    """
    gc.disable()
    import ratchet.engine.api.server  # noqa: F401

    collect_garbage()
    gc.enable()


def resolve_key(key: str | None) -> str:
    """Return the key, or a random one; the SDK refuses keys that do not begin with tml-."""
    if key is None or key == "":
        return f"tml-{secrets.token_hex(24)}"
    if not key.startswith("tml-"):
        raise RequestRefused("TINKER_API_KEY does not begin with tml-; correct it, or unset it")
    return key


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket, with TCP as its explicit protocol so that asyncio disables Nagle's delay."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise RequestRefused(
            f"cannot listen on {host} port {port}: {error}; give another --port, or 0 to pick a "
            "free one"
        ) from error
    return listener


def _follow_stdin(tell: Callable[[str | None], None]) -> None:
    """Read the descriptor to its end, and tell its lines, and None at its end.

    A daemon thread in sys.stdin would break the exit.
    """
    begun = b""
    while read := os.read(0, 4096):
        *lines, begun = (begun + read).split(b"\n")
        for line in lines:
            tell(os.fsdecode(line))
    tell(None)


def _announce(host: str, port: int, key: str) -> None:
    shown = f"[{host}]" if ":" in host else host
    print(f"export TINKER_BASE_URL=http://{shown}:{port}")
    print(f"export TINKER_API_KEY={key}", flush=True)


if __name__ == "__main__":
    main()
