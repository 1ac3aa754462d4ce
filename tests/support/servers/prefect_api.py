"""How tests ask a Prefect server of theirs: as Prefect's own client does."""

import httpx
from prefect.client.base import PrefectHttpxSyncClient

ANSWER_SECONDS = 120.0
"""On a busy machine the server may wait 60 s for its SQLite database."""


def prefect_api(url: str) -> httpx.Client:
    """Asks again where the server says that its database is locked. Errors are answers."""
    return PrefectHttpxSyncClient(base_url=url, timeout=ANSWER_SECONDS, raise_on_all_errors=False)
