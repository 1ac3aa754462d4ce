"""The flows of Ratchet, whose libraries send no telemetry unless the user has turned that on, and
whose clients use no proxy for this machine."""

from flows.own_packages import check_packages

check_packages()  # before one of them is imported

from adapters.clients.silence import send_no_telemetry  # noqa: E402
from adapters.network.proxies import spare_loopback  # noqa: E402

send_no_telemetry()  # before Prefect is imported
spare_loopback()  # before a client is made
