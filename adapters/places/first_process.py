"""The first program in a cage: makes the socket of the door, sets limits, becomes the agent's.

It is run as a text, by a Python without its site packages: the cage shows no file of Ratchet's.
"""

import json
import os
import resource
import socket
import sys

try:
    from os import pidfd_open
except ImportError:  # a Python that was built on an older system
    import ctypes

    def pidfd_open(pid: int) -> int:
        return ctypes.CDLL(None).syscall(434, pid, 0)


def main() -> None:
    told, *words = sys.argv[1:]
    given = json.loads(told)
    channel = socket.socket(fileno=given["channel"])
    channel.set_inheritable(False)
    handed = [pidfd_open(1)]
    if given["port"] is not None:
        listener = socket.create_server(("127.0.0.1", given["port"]), backlog=128)
        handed.append(listener.fileno())
    socket.send_fds(channel, [b"."], handed)
    channel.recv(1)  # until the host can end what begins here
    for limit, most in given["limits"].items():
        resource.setrlimit(getattr(resource, limit), (most, most))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        channel.send(b"-")
        sys.stderr.write(f"{words[0]} cannot be started: {error}\n")
        sys.exit(127)  # as a shell says it


main()
