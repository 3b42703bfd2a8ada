"""What can go wrong."""


class BartlebyError(Exception):
    """The root of every error Bartleby raises."""
