"""Errors of a caller, sent with a status 4xx because the SDK retries a 5xx for minutes."""


class RequestRefused(ValueError):
    """A request that cannot be carried out; the message is shown to the user."""

    status = 400


class NotFound(RequestRefused):
    """A request that names something unknown; the SDK raises at once."""

    status = 404


class Gone(RequestRefused):
    """A request that names something no longer kept; a SamplingClient submits again."""

    status = 410
