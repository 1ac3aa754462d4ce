"""The one kind of error that is shown to a user without a stack trace."""


class UserError(Exception):
    """Something that its user can mend: the text states the fact, the value and the remedy."""
