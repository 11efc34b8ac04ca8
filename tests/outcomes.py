"""What came of a call on a rank."""


def outcome(function):
    """Return what happened, picklable: (name of the exception or None, its text).

    A rank that waits in vain gets the group's time-out, an error of torch.distributed, and no RankMismatch.
    """
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""
