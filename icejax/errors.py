"""The one exception that is the user's to mend."""


class InputError(ValueError):
    """Raised for bad input: the message is one line that says what was expected, what was found and what to do.

    The command lines print it as it is and exit with status 2.
    """
