"""Mistakes of a caller: told in a sentence and as a 4xx, because the SDK waits minutes on a 5xx."""


class UserError(ValueError):
    """The request cannot be carried out as asked. The text is shown to the user."""

    status = 400


class NotFound(UserError):
    """What the request names is not here; the SDK raises at once."""

    status = 404


class Gone(UserError):
    """It was here once. A SamplingClient answers this status by submitting its request anew."""

    status = 410
