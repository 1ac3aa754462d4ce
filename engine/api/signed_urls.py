"""URLs that open one file for a while: the SDK sends no key with a download."""

import hmac
import time
from urllib.parse import parse_qs, quote, urlencode

from starlette.types import Scope

SECONDS = 3600
"""Time for which a URL is valid."""


class SignedUrls:
    """URLs signed by the engine's key."""

    def __init__(self, api_key: str) -> None:
        self._key = api_key.encode()

    def sign(self, server: str, path: str, expires: int) -> str:
        """Return the URL of a path of the server, valid until a time in seconds since 1970."""
        query = urlencode({"expires": expires, "signature": self._signature(path, str(expires))})
        return f"{server.rstrip('/')}{quote(path)}?{query}"

    def opens(self, scope: Scope) -> bool:
        """Return whether a request has a signature of its path that is still valid."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        expires, given = (query.get(name, [""])[0] for name in ("expires", "signature"))
        if scope["method"] != "GET" or not given.isascii():
            return False
        signed = hmac.compare_digest(given, self._signature(scope["path"], expires))
        return signed and int(expires) > time.time()

    def _signature(self, path: str, expires: str) -> str:
        return hmac.digest(self._key, f"{expires} {path}".encode(), "sha256").hex()
