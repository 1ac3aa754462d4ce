"""The command `python -m engine`: a Tinker server on this machine, until it is stopped."""

import argparse
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from engine import base_models
from engine.disk import alone
from engine.errors import UserError

logger = logging.getLogger("engine")

SHIPPED = "local/tiny-chat"
REFUSED = 2
"""Exit status where the command cannot start as asked."""
INTERRUPTED = 130
TOLD_LATER = "-"
LOG = "engine.log"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve, then end the process at once: what is kept is on disk, nobody waits for what is
    still computed, and the interpreter would take a second to tear torch down."""
    options = parser().parse_args(argv)
    status = 0
    try:
        if str(options.state) == TOLD_LATER:
            options.state = _told_state()
        serve(**vars(options))
    except UserError as error:
        print(f"engine: {error}", file=sys.stderr)
        status = REFUSED
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="engine",
        description="Serve the Tinker API from this machine. Prints two export lines when ready.",
        epilog="The key is TINKER_API_KEY where that is set, and random otherwise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--base-model", default=SHIPPED, help="local/..., a folder, or a hub name")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on")
    made.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    made.add_argument(
        "--state",
        type=Path,
        default=Path("runs/engine"),
        help="what it keeps; -: the folder, and engine.log in it, named on standard input",
    )
    made.add_argument("--threads", type=int, default=1, help="threads of one computation")
    made.add_argument("--device", default="cpu", help="cpu, cuda, mps")
    made.add_argument(
        "--exit-with-stdin", action="store_true", help="stop when standard input closes"
    )
    return made


def serve(
    base_model: str = SHIPPED,
    host: str = "127.0.0.1",
    port: int = 0,
    state: Path = Path("runs/engine"),
    threads: int = 1,
    device: str = "cpu",
    api_key: str | None = None,
    exit_with_stdin: bool = False,
) -> None:
    """Serve until a signal, or the end of standard input, stops it.

    Raises UserError where it cannot start: no such model, a port or state folder in use.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stopped = threading.Event()
    if exit_with_stdin:
        threading.Thread(target=_follow_stdin, args=(stopped.set,), daemon=True).start()
    key = checked_key(api_key or os.environ.get("TINKER_API_KEY"))
    if threads < 1:
        raise UserError(f"--threads is {threads}; it must be 1 or more")
    base = base_models.find(base_model)
    with listening(host, port) as listener, alone(state):
        _enter_in_cache(base)
        # Imported here: torch and transformers take seconds, and --help or a mistake should not.
        from engine.running import run

        run(base, listener, state, threads, device, key, stopped, _announce)


def _told_state() -> Path:
    """Load the libraries, then wait for the folder's name. From then on its log is in there."""
    import engine.running  # noqa: F401

    state = Path(sys.stdin.readline().rstrip("\n"))
    if not state.name:
        raise UserError("--state is -, and standard input names no folder; name one in its line 1")
    with (state / LOG).open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    return state


def _enter_in_cache(base: base_models.BaseModel) -> None:
    try:
        base_models.enter_in_cache(base)
    except OSError as error:  # all but SamplingClient.get_tokenizer works without it
        logger.warning("no Hugging Face cache entry for %s: %s", base.name, error)


def checked_key(key: str | None) -> str:
    """The key, or a random one. The SDK refuses one that does not begin with tml-."""
    if key is None or key == "":
        return f"tml-{secrets.token_hex(24)}"
    if not key.startswith("tml-"):
        raise UserError("TINKER_API_KEY does not begin with tml-; mend it, or unset it")
    return key


def listening(host: str, port: int) -> socket.socket:
    """A bound socket. Its protocol is named, or asyncio would leave Nagle's delay switched on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {error}; give another --port (0: any free one)"
        ) from error
    return listener


def _follow_stdin(ended: Callable[[], None]) -> None:
    """Reads the descriptor: a daemon thread inside sys.stdin breaks the interpreter's end."""
    while os.read(0, 4096):
        pass
    ended()


def _announce(host: str, port: int, key: str) -> None:
    shown = f"[{host}]" if ":" in host else host
    print(f"export TINKER_BASE_URL=http://{shown}:{port}")
    print(f"export TINKER_API_KEY={key}", flush=True)


if __name__ == "__main__":
    main()
