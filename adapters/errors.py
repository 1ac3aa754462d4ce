"""The kinds of error that are shown to a user without a stack trace."""


class UserError(Exception):
    """Something that its user can mend: the text states the fact, the value and the remedy."""


class ServiceError(UserError):
    """The Tinker service cannot be used, for a reason its user can mend."""


class EngineDied(ServiceError):
    """The engine's process ended while it was needed."""
