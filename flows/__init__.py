"""The flows of Ratchet, whose import prepares the process in which they run.

Libraries send no telemetry unless the user has turned that on, and import torch when they use it.
Clients read certificates once and use no proxy for this machine, no variable names what is not
there, and as many files may be open as the system allows.
"""

from ratchet.adapters.clients import libraries
from ratchet.adapters.network.addresses import spare_loopback
from ratchet.adapters.process.open_files import raise_limit

libraries.send_no_telemetry()  # before Prefect is imported
libraries.spare_machine()
libraries.share_contexts()
libraries.spare_torch()
spare_loopback()  # before a client is made
raise_limit()
