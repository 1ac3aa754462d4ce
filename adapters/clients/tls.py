"""TLS contexts of HTTP clients, for which a process reads the certificates once.

Reading them takes tens of milliseconds. The clients of OpenAI and Anthropic do it whenever one is
created, and an agent creates one in each rollout.
"""

import os
import ssl
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from pathlib import Path
from threading import Lock
from types import ModuleType

from adapters.clients.imports import when_imported

TRANSPORTS = ("httpx._transports.default", "httpx2._transports.default")
"""Modules in which a client's transports get their context."""

HTTP_1 = ["http/1.1"]
"""Protocols that a client offers, unless it asks for HTTP/2."""

_reading = Lock()
"""Held while a context is looked up, since threads that miss it together would each read it."""


@cache
def tls() -> ssl.SSLContext:
    """Return the context of the player's own clients."""
    return ssl.create_default_context()


class SharedContext(ssl.SSLContext):
    """TLS context of all clients that give none of their own, which none of them can change."""

    def __getattribute__(self, name: str) -> object:
        if name.startswith(("load_", "set_")) and name != "set_alpn_protocols":
            raise _refuse_change(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise _refuse_change(name)

    def set_alpn_protocols(self, alpn_protocols: object) -> None:
        """Keep the protocols: each connection sets them again, which is not safe beside threads."""
        if alpn_protocols != HTTP_1:
            raise _refuse_change("set_alpn_protocols")


@cache
def share_contexts() -> None:
    """Have the clients of httpx that give no context, certificate or HTTP/2 share one context.

    `verify=` and `httpx.create_ssl_context()` give each client its own, as before.
    """
    for name in TRANSPORTS:
        when_imported(name, _share)


def _share(module: ModuleType) -> None:
    for transport in (module.HTTPTransport, module.AsyncHTTPTransport):
        transport.__init__ = _sharing(transport.__init__, module.create_ssl_context)


@lru_cache(maxsize=16)
def _shared_context(
    create: Callable[..., ssl.SSLContext], trust_env: object, _environment: tuple[object, ...]
) -> ssl.SSLContext | bool:
    """Create the context of clients that give none; True where the system's own is cheap."""
    context = create(trust_env=trust_env)
    if type(context) is not ssl.SSLContext:
        return True
    context.set_alpn_protocols(HTTP_1)
    context.__class__ = SharedContext
    return context


def _sharing(
    init: Callable[..., None], create: Callable[..., ssl.SSLContext]
) -> Callable[..., None]:
    @wraps(init)
    def init_sharing(self: object, *args: object, **options: object) -> None:
        own = args or options.get("cert") or options.get("http2")
        if not own and options.get("verify", True) is True:
            with _reading:
                trusts = options.get("trust_env", True)
                options["verify"] = _shared_context(create, trusts, _environment())
        init(self, *args, **options)

    return init_sharing


def _environment() -> tuple[object, ...]:
    """Return what a new context would depend on, so that a change of it has its effect."""
    file = Path(os.environ.get("SSL_CERT_FILE", ""))
    changed = file.stat().st_mtime_ns if file.is_file() else None
    return file, changed, os.environ.get("SSL_CERT_DIR"), os.environ.get("SSLKEYLOGFILE")


def _refuse_change(name: str) -> AttributeError:
    return AttributeError(
        f"{name} would change the TLS context that all HTTP clients of this process share; give "
        "the client its own: verify=ssl.create_default_context()"
    )
