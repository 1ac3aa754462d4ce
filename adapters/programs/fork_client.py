"""The process of a program that a fork server runs: it lends what it has, and ends as that does.

It is run by an isolated Python, with a socket of the server, the number of the words of the
program's interpreter, and all words of the program. Where no server answers, it becomes that.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

ANSWER_SECONDS = 150
"""Time in which a server must have forked: it may be at an import."""


def main() -> None:
    number, words_of_interpreter, *words = sys.argv[1:]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = os.getcwd()  # noqa: PTH109  pathlib takes a while to import
    request = {"words": words[int(words_of_interpreter) :], "limit": limit}
    request |= {"variables": {**os.environ}, "folder": folder}
    channel, (ours, theirs) = socket.socket(fileno=int(number)), socket.socketpair()
    channel.set_inheritable(False)
    ours.settimeout(ANSWER_SECONDS)
    try:
        socket.send_fds(channel, [b"."], [theirs.fileno()])
        theirs.close()
        socket.send_fds(ours, [b"."], [0, 1, 2])
        ours.sendall(json.dumps(request).encode() + b"\n")
        begun = ours.recv(1)
    except OSError:
        begun = b""
    if not begun:
        os.execv(words[0], words)
    ours.settimeout(None)
    status = int(ours.recv(16) or -signal.SIGKILL)
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
