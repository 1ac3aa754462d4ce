"""The errors that are shown to a user without a stack trace."""


class UserError(Exception):
    """An error that its user can mend: its text states the fact, the value and the remedy."""

    status = 2
    """Exit status of a command that it ends."""


class PassingError(UserError):
    """An error that may pass: the same work may succeed later, with nothing changed."""


class ServiceError(UserError):
    """An error of the Tinker service that its user can mend."""


class EngineDied(ServiceError):
    """The end of the engine's process while it was needed."""
