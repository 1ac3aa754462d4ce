"""Errors of the Tinker SDK, translated into a sentence and into whether a retry may succeed."""

import tinker
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from adapters.errors import PassingError, ServiceError
from adapters.process.open_files import check_files


class ServiceRefused(ServiceError):
    """A refusal that a retry cannot change; `missing` if what the request names does not exist."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class ServiceFailed(ServiceError, PassingError):
    """A failure of the network or the service; the same request may succeed later."""


class TimedOut(ServiceFailed):
    """A request that the service did not answer in time."""


SDK_ERRORS = (tinker.TinkerError, RetryableException, ValueError, RuntimeError)
"""All errors that a future of the SDK raises: ValueError for a poll that fails, RuntimeError for a
client that has failed before."""

PASSING = {408, 409, 410, 429}


def translate_error(error: Exception, what: str) -> Exception:
    """Translate an SDK error into a ServiceError about `what`; return any other error unchanged.

    OutOfFiles if this process could not open a connection to the service.
    """
    check_files(error)
    if isinstance(error, tinker.RequestFailedError):
        said = error.message.removeprefix("Request failed: ").partition(" for self.request_id")[0]
        if error.category is RequestErrorCategory.User:
            return _refused(what, said)
        return _failed(what, said)
    if isinstance(error, tinker.APIStatusError):
        status, said = error.status_code, f"{_detail(error)} ({error.status_code})"
        if status in PASSING or status >= 500:
            return _failed(what, said)
        return _refused(what, said, missing=status == 404)
    if isinstance(error, tinker.APIConnectionError | RetryableException):
        return _failed(what, str(error))
    if isinstance(error.__cause__, SDK_ERRORS):
        return translate_error(error.__cause__, what)
    return error


def _failed(what: str, said: str) -> ServiceFailed:
    return ServiceFailed(
        f"the Tinker service failed at {what}: {said}. Start the same run again to go on"
    )


def _refused(what: str, said: str, missing: bool = False) -> ServiceRefused:
    return ServiceRefused(f"the Tinker service refuses {what}: {said}", missing)


def _detail(error: tinker.APIStatusError) -> str:
    body = error.body
    return str(body.get("detail", body)) if isinstance(body, dict) else error.message
