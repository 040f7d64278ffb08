"""Errors that callers are expected to catch by name."""

__all__ = ["BadReply", "NotEnoughMemory"]


class BadReply(ValueError):  # noqa: N818 - it names the thing refused, as StopIteration does
    """A client's reply that cannot be used; the server drops it and goes on.

    Parameters
    ----------
    reason : str
        Short kebab-case category (``"shape"``, ``"non-finite"``, ...): rounds count rejected
        replies by it.
    detail : str
        What was expected and what came, for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class NotEnoughMemory(MemoryError):  # noqa: N818
    """A computation that was refused because its arrays would not fit in memory."""
