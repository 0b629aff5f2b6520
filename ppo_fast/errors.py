"""The one exception that means: the user can fix this. The command line prints its message and exits with 2."""


class UserError(Exception):
    """Bad input, in one sentence that names what was wrong and what to do about it."""
