"""The first process in a cage: makes the socket of the door, sets limits, becomes the program.

It is run as a text, by a Python without its site packages: the cage shows no file of Ratchet's.
"""

import json
import os
import resource
import socket
import sys


def main() -> None:
    told, *words = sys.argv[1:]
    given = json.loads(told)
    channel = socket.socket(fileno=given["channel"])
    channel.set_inheritable(False)
    if given["port"] is not None:
        with socket.create_server(("127.0.0.1", given["port"]), backlog=128) as listener:
            socket.send_fds(channel, [b"."], [listener.fileno()])
    for limit, most in given["limits"].items():
        resource.setrlimit(getattr(resource, limit), (most, most))
    try:
        channel.send(b"+")
        os.execvp(words[0], words)
    except OSError as error:
        channel.send(b"-")
        sys.stderr.write(f"{words[0]} cannot be started: {error}\n")
        sys.exit(127)  # as a shell says it


main()
