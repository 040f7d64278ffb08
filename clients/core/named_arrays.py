"""The arrays of a message, as the list that Flower's NumPyClient knows, with their names."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

Record = Mapping[str, NDArray[Any]]


class NamedArrays(list[NDArray[Any]]):
    """A list of arrays that also knows the records and names under which they travel.

    :func:`~fedntk.clients.client_app` hands it to ``fit``, ``evaluate`` and ``query``. A client
    that returns one from ``fit`` names the records of its reply.

    Parameters
    ----------
    records : mapping of str to mapping of str to ndarray
        Record -> name -> array.
    unreadable : mapping of str to str, optional
        Record -> why it could not be read. Only records that come from other clients are left out
        so; any other one fails the message.
    """

    def __init__(
        self, records: Mapping[str, Record], unreadable: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(array for record in records.values() for array in record.values())
        self.records = {name: dict(record) for name, record in records.items()}
        self.unreadable = dict(unreadable or {})


def records_of(
    parameters: Sequence[NDArray[Any]], *names: str, strategy: str
) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the records of what ``fit`` was given; `strategy` sends those that must be there."""
    if not isinstance(parameters, NamedArrays):
        raise ValueError(
            f"expected NamedArrays with the records of the strategy {strategy}, as client_app "
            f"hands on, got a {type(parameters).__name__} without names"
        )
    records = parameters.records
    if missing := [name for name in names if name not in records]:
        received = ", ".join(records) or "none"
        raise ValueError(
            f"expected the records {', '.join(names)}, got {received}; {', '.join(missing)} comes "
            f"from the strategy {strategy}"
        )
    return records
