"""Errors that callers are expected to catch by name."""


class BadReply(ValueError):  # noqa: N818 - it names the thing refused, as StopIteration does
    """A client's reply that cannot be used; the server drops it and goes on.

    Rounds count rejected replies by `reason`, a short kebab-case category (``"shape"``,
    ``"non-finite"``, ...); `detail` tells the log what was expected and what came.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class NotEnoughMemory(MemoryError):  # noqa: N818
    """A computation that was refused because its arrays would not fit in memory."""
