"""The address of a Prefect server's interface, with which the links that a flow prints begin.

Prefect takes it to be that of the API without `/api`. A server has its older interface there, and
the default one at an address that it tells.
"""

import httpx
from prefect.settings import get_current_settings

ANSWER_SECONDS = 5.0


def find_interface(api_url: str) -> str | None:
    """Return the address of the interface that a server shows by default.

    None if the user has named one, or if the server tells none, as an older one, one without an
    interface, or Prefect's cloud.
    """
    address = api_url.rstrip("/").removesuffix("/api")
    if "ui_url" in get_current_settings().model_fields_set or address == api_url.rstrip("/"):
        return None
    try:
        told = httpx.get(f"{address}/ui-settings", timeout=ANSWER_SECONDS).raise_for_status().json()
        base = told[f"{told['default_ui']}_base_url"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return f"{address}{base}".rstrip("/") if isinstance(base, str) else None
