"""The flows of Ratchet, whose libraries send no telemetry unless the user has turned that on."""

from adapters.clients.silence import send_no_telemetry

send_no_telemetry()  # before Prefect is imported
