"""Proxies of the environment, by which no client reaches this machine itself."""

import os
import sys
from collections.abc import Mapping

from adapters.errors import UserError
from adapters.network.addresses import LOOPBACK_HOSTS

DIRECT = (*LOOPBACK_HOSTS, "::1")
"""Hosts that no client reaches by a proxy."""

EXEMPT = ("no_proxy", "NO_PROXY")
"""Variables that name the hosts without a proxy. Some clients read only one of them."""

SOCKS = "one is a SOCKS proxy, which needs the package socksio: install that"
PLAIN = (
    "write a proxy as http://host:port, and a host of NO_PROXY as a name, or as an address without "
    "brackets and, in IPv6, without a range"
)


def spare_loopback() -> None:
    """Have no client, here or in a process that is started from here, use a proxy for loopback.

    The variables are set also where none names a proxy, since an agent may load a file that does.
    """
    os.environ.update(exempt_loopback(os.environ, sys.platform))


def exempt_loopback(variables: Mapping[str, str], platform: str) -> dict[str, str]:
    """Return the variables EXEMPT with the hosts of DIRECT after those that they name.

    On macOS a variable alone would hide the proxies of the system's own settings.
    """
    proxies = [name for name in variables if name.lower().endswith("_proxy")]
    if platform == "darwin" and not {*proxies} - {*EXEMPT}:
        return {}
    named = variables.get(EXEMPT[0], variables.get(EXEMPT[1], ""))
    return {name: _with_direct(variables.get(name, named)) for name in EXEMPT}


def _with_direct(named: str) -> str:
    """Return a list of hosts with those of DIRECT, unless it is the star, which is all hosts."""
    if named.strip() == "*":
        return named
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    return ",".join([*hosts, *(host for host in DIRECT if host not in hosts)])


def check_proxies() -> None:
    """Refuse (UserError) proxies, or hosts without one, that the HTTP client cannot read.

    The client refuses them also where no address needs them. A proxy may hold a password, and is
    not shown.
    """
    import httpx  # takes a tenth of a second, which a command that asks nobody need not wait

    try:
        httpx.Client(verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        names = ", ".join(name for name in sorted(os.environ) if name.lower().endswith("_proxy"))
        remedy = SOCKS if isinstance(error, ImportError) else PLAIN
        raise UserError(
            f"the proxies of the environment ({names}) cannot be used; {remedy}, or unset the "
            "variables"
        ) from error
