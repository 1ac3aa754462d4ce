"""Addresses of servers, a cluster and the door, what may lie open on a network, and proxies."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ratchet.adapters.errors import UserError

REACH_SECONDS = 5.0
LOOPBACK = "127.0.0.1"
LOOPBACK_HOSTS = (LOOPBACK, "localhost")

DIRECT = (*LOOPBACK_HOSTS, "::1")
"""Hosts that no client reaches by a proxy."""

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
"""Variables that name the server of an object store."""

EXEMPT = ("no_proxy", "NO_PROXY")
"""Variables that name the hosts without a proxy. Some clients read only one of them."""

PORTS = {"https": 443, "postgresql+asyncpg": 5432}
"""Scheme of a URL → the port that one without a port means; 80 for others."""

SOCKS = "one is a SOCKS proxy, which needs the package socksio: install that"
PROXY_REMEDY = (
    "write a proxy as http://host:port, and a host of NO_PROXY as a name, or as an address without "
    "brackets and, in IPv6, without a range"
)


@dataclass(frozen=True)
class Certificate:
    """A TLS certificate and its private key, as files in PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Listener:
    """The host and port that a server binds; port 0 is any free port. It speaks TLS if it can."""

    host: str = LOOPBACK
    port: int = 0
    tls: Certificate | None = None

    def url(self, port: int) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{port}"


def check_listener(url: str, named: str, remedy: str) -> None:
    """Refuse (UserError) the server that is `named`, with a remedy, if nothing listens at its URL.

    Behind a proxy nothing is known, since the proxy alone reaches the server.
    """
    try:
        _reach(url)
    except (OSError, ValueError) as error:
        raise UserError(f"{named} cannot be reached ({error}); {remedy}") from error


def _reach(url: str) -> None:
    """Raise OSError if nothing listens at a URL, ValueError if it has no host and port."""
    from urllib.request import getproxies, proxy_bypass  # slow, and few commands need it

    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError("it has no host; write it as http://host:port")
    if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(parts.hostname):
        return
    port = parts.port or PORTS.get(parts.scheme, 80)
    socket.create_connection((parts.hostname, port), REACH_SECONDS).close()


def check_runner(runner: str, cluster: str | None, door: str | None) -> None:
    """Refuse (ValueError) an address that a runner ignores or leaves open."""
    if cluster is not None and runner != "dask":
        raise ValueError(
            f"cluster {cluster!r} would be ignored by the runner {runner}; give runner dask, or "
            "leave it out"
        )
    if door is not None and cluster is None:
        raise ValueError(
            f"door {door!r} would be reached by nobody, since without a cluster rollouts are "
            "played on this machine; give the cluster's address, or leave it out"
        )
    if cluster is not None:
        check_cluster(cluster)
    if door is not None:
        check_door(door)


def check_cluster(address: str) -> None:
    """Raise ValueError for a malformed address, or for tcp:// off loopback."""
    scheme, host, port = _parts(address)
    if scheme not in ("tcp", "tls") or not host or not port:
        raise ValueError(
            f"cluster {address!r} is no address of a Dask scheduler; write tls://host:8786"
        )
    if scheme == "tcp" and host not in LOOPBACK_HOSTS:
        raise ValueError(
            f"cluster {address!r} has no TLS, so anybody on the network could run code on its "
            f"workers; start the scheduler with certificates and write tls://{host}:{port}"
        )


def check_door(url: str) -> None:
    """Refuse (ValueError) a URL that the door cannot bind, or that shows tokens to a network."""
    scheme, host, port = _parts(url)
    if scheme not in ("http", "https") or not host or not port or urlsplit(url).path:
        raise ValueError(
            f"door {url!r} is no URL of a host and a port; write one that the workers reach, such "
            "as https://10.0.0.1:8600"
        )
    if scheme == "http" and host not in LOOPBACK_HOSTS:
        raise ValueError(
            f"door {url!r} would send tokens and rollouts over the network in clear; write "
            f"https://{host}:{port}"
        )


def check_place(model: str) -> str:
    """Return the service of a model, URL#MODEL; ValueError if it is none, or open to a network."""
    url, _, name = model.partition("#")
    scheme, host, _ = _parts(url)
    if scheme not in ("http", "https") or not host or not name or {*"@?"} & {*url}:
        raise ValueError(
            f"{model!r} is no model of a service; write URL#MODEL, such as "
            "https://host#Qwen/Qwen3-8B, without a key, which is read from the environment"
        )
    if scheme == "http" and host not in LOOPBACK_HOSTS:
        raise ValueError(
            f"{model!r} would send tokens and a key over the network in clear; write "
            f"https://{host}#{name}"
        )
    return url


def _parts(url: str) -> tuple[str, str, int]:
    """Split a URL into scheme, host and port; each is empty or 0 where the URL has none."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:  # above 65535, or no number
        port = None
    return parts.scheme, parts.hostname or "", port or 0


def spare_loopback() -> None:
    """Have no client, here or in a process that is started from here, use a proxy for loopback.

    They are set also where no proxy is named, since an agent may load a file that does so.
    """
    os.environ.update(exempt_loopback(os.environ, sys.platform))


def exempt_loopback(variables: Mapping[str, str], platform: str) -> dict[str, str]:
    """Return the variables EXEMPT with the hosts of DIRECT added.

    On macOS a variable alone would hide the proxies of the system's own settings.
    """
    proxies = [name for name in variables if name.lower().endswith("_proxy")]
    if platform == "darwin" and not {*proxies} - {*EXEMPT}:
        return {}
    named = variables.get(EXEMPT[0], variables.get(EXEMPT[1], ""))
    return {name: _with_direct(variables.get(name, named)) for name in EXEMPT}


def _with_direct(named: str) -> str:
    """Return a list of hosts with DIRECT added, unless it is `*`, which is all hosts."""
    if named.strip() == "*":
        return named
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    return ",".join([*hosts, *(host for host in DIRECT if host not in hosts)])


def check_proxies() -> None:
    """Refuse (UserError) proxies, or hosts without one, that the HTTP client cannot read.

    It does so also where no address needs them. No proxy is shown: it may hold a password.
    """
    import httpx  # takes a tenth of a second, which a command that asks nobody need not wait

    try:
        httpx.Client(verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        names = ", ".join(name for name in sorted(os.environ) if name.lower().endswith("_proxy"))
        remedy = SOCKS if isinstance(error, ImportError) else PROXY_REMEDY
        raise UserError(
            f"the proxies of the environment ({names}) cannot be used; {remedy}, or unset the "
            "variables"
        ) from error
