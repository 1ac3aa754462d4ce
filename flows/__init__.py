"""The flows of Ratchet, whose import prepares the process in which they run.

Libraries send no telemetry unless the user has turned that on, no client uses a proxy for this
machine, and as many files may be open as the system allows.
"""

from flows.own_packages import check_packages

check_packages()  # before one of them is imported

from adapters.clients.silence import send_no_telemetry  # noqa: E402
from adapters.network.proxies import spare_loopback  # noqa: E402
from adapters.process.open_files import raise_limit  # noqa: E402

send_no_telemetry()  # before Prefect is imported
spare_loopback()  # before a client is made
raise_limit()
