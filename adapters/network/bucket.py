"""A bucket of an object store, by obstore: what is asked of it, and what its refusals mean.

obstore reads the credentials from the environment, and no text of its own reaches a message: it may
quote a request. A request is tried again here and nowhere else.
"""

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
import tenacity
from obstore import exceptions as refusals
from obstore.store import from_url

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import DIRECT, ENDPOINTS

READER_SECONDS = 20.0
"""Time in which a reader's request is tried again."""
LONGEST_PAUSE = 10.0
UNNAMED_SECONDS = 86_400.0
"""Time that a process has to put an index with the objects that it has put before."""
LIMITS = {"timeout": "300 seconds", "connect_timeout": "5 seconds"}
"""Limits of a request, which may carry an engine's weights."""
SCHEMES = ("s3", "gs", "az", "abfss")

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>(\w+)</Code>")
KEY_SERVER = "169.254.169.254"
"""Address at which a cloud's machine is given a key, asked where the environment has none."""
REMEDIES = {
    "RequestTimeTooSkewed": "set the clock of this machine",
    "403": "mend the key in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or what it may do there",
    "404": "make the bucket, or mend RATCHET_RUNS",
}
"""Remedy by the store's own code of an error, or by its status."""

Version = dict[str, str]
"""What obstore calls the version of an object, by which it is replaced."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class StoreError(UserError):
    """Refusal of an object store, or of what was asked of it."""


class StoreAway(StoreError):
    """Absence of an answer that may come later."""


class Conflict(StoreError):
    """Refusal to replace an object that is not as it was."""


@dataclass(frozen=True)
class Bucket:
    """A bucket below a prefix; `leaving` ends its waits, `told` says that the log has one."""

    address: str
    store: Any = field(repr=False, compare=False)
    patience: float
    leaving: Event = field(default_factory=Event, repr=False, compare=False)
    told: Event = field(default_factory=Event, repr=False, compare=False)

    def get(self, key: str) -> tuple[bytes, Version] | None:
        """Return an object and its version; None if it is not there."""

        def read() -> tuple[bytes, Version]:
            found = obstore.get(self.store, key)
            return bytes(found.bytes()), _version(found.meta)

        try:
            return self._ask(read)
        except FileNotFoundError:
            return None

    def add(self, key: str, data: bytes) -> None:
        """Put an object that is named after its bytes, also in place of itself: it is new then."""
        self._ask(lambda: obstore.put(self.store, key, data))

    def remove_old(self, key: str) -> bool:
        """Remove an object that no index names, unless it is new; return whether it was."""
        with suppress(FileNotFoundError):
            found = self._ask(lambda: obstore.head(self.store, key))
            if (datetime.now(UTC) - found["last_modified"]).total_seconds() > UNNAMED_SECONDS:
                self._ask(lambda: obstore.delete(self.store, key))
                return True
        return False

    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        """Put an object in place of its `version`, or where there is none; return its new version.

        Conflict if it has another version. One that has these bytes is an earlier try's.
        """
        mode: Any = version or "create"
        try:
            return _version(self._ask(lambda: obstore.put(self.store, key, data, mode=mode)))
        except (refusals.AlreadyExistsError, refusals.PreconditionError, FileNotFoundError):
            found = self.get(key)
            if found is not None and found[0] == data:
                return found[1]
            raise Conflict(f"{self.address}/{key} was replaced by another process") from None

    def list(self, folder: str) -> dict[str, str]:
        """Map the keys directly below a folder to a tag that changes with the object."""
        found = self._ask(lambda: obstore.list_with_delimiter(self.store, f"{folder}/"))
        return {one["path"]: one["e_tag"] or "" for one in found["objects"]}

    def sizes(self, folder: str) -> dict[str, int]:
        """Map the keys anywhere below a folder to the objects' bytes."""
        pages = self._ask(lambda: [*obstore.list(self.store, f"{folder}/")])
        return {one["path"]: one["size"] for page in pages for one in page}

    def _ask(self, request: Callable[[], T]) -> T:
        """Return the answer of a request, which is tried again while none comes."""
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreAway),
            wait=tenacity.wait_exponential(multiplier=0.1, max=LONGEST_PAUSE),
            stop=tenacity.stop_after_delay(self.patience)
            | tenacity.stop_when_event_set(self.leaving),
            sleep=tenacity.sleep_using_event(self.leaving),
            before_sleep=self._tell,
            reraise=True,
        )
        answer = tries(lambda: self._try(request))
        self.told.clear()
        return answer

    def _try(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except (FileNotFoundError, refusals.BaseError) as error:
            said = str(error)
            answers = (refusals.AlreadyExistsError, refusals.PreconditionError, FileNotFoundError)
            if isinstance(error, answers) and _code_of(said) != "NoSuchBucket":
                raise
            raise self._explain(said) from None

    def _explain(self, said: str) -> StoreError:
        """Say what an error of obstore's means."""
        status, code = "".join(STATUS.findall(said)[:1]), _code_of(said)
        if KEY_SERVER in said:
            status, code = "403", "the environment has no key"
        if not status or status >= "500" or status in ("408", "429"):
            answered = f", or answers {status}" if status else ""
            return StoreAway(
                f"{self.address} does not answer{answered}; look at its server and at the network, "
                "then repeat the command"
            )
        other = REMEDIES.get(status, "look at RATCHET_RUNS and at the store's own log")
        said = f"{self.address} refuses what is asked of it ({f'{status} {code}'.strip()})"
        return StoreError(f"{said}; {REMEDIES.get(code, other)}")

    def _tell(self, tried: tenacity.RetryCallState) -> None:
        again = tried.attempt_number > 1  # the first may be a connection that was just closed
        if again and not self.told.is_set():
            self.told.set()
            log.warning("%s does not answer; it is asked until it does", self.address)


def open_bucket(address: str) -> Bucket:
    """Return the bucket at an address; StoreError if it cannot be used."""
    if urlsplit(address).scheme not in SCHEMES or set("@?#") & set(address):
        known = ", ".join(f"{one}://" for one in SCHEMES)
        raise StoreError(
            f"RATCHET_RUNS={address} is not the address of an object store; give {known} and a "
            "bucket, with no key in it, or the path of a folder"
        )
    client: Any = {"allow_http": _is_plain(), **LIMITS}
    try:
        store = from_url(address, client_options=client, retry_config={"max_retries": 0})
    except refusals.BaseError as error:
        why = str(error).splitlines()[0].rpartition("error: ")[2]
        raise StoreError(f"RATCHET_RUNS={address} cannot be opened: {why}; mend it") from None
    return Bucket(address, store, READER_SECONDS)


def _is_plain() -> bool:
    """Return whether the store speaks plain HTTP on loopback; StoreError if it does elsewhere."""
    plain = False
    for name in ENDPOINTS:
        url = urlsplit(os.environ.get(name, ""))
        if url.scheme == "http" and url.hostname not in DIRECT:
            raise StoreError(
                f"{name} is plain HTTP to {url.hostname}, by which keys and runs lie open on the "
                "network; give https://"
            )
        plain |= url.scheme == "http"
    return plain


def _code_of(said: str) -> str:
    """Return a store's own code of an error; empty if it gave none."""
    return "".join(CODE.findall(said)[:1])


def _version(described: Any) -> Version:
    return {key: described[key] for key in ("e_tag", "version") if described.get(key)}
