"""Which rounds count of the arrays that clients keep on their disks."""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from fedntk.ntk.payloads import wire


class ClientRounds:
    """The last round of each client in which its reply was accepted, in one run.

    Attributes
    ----------
    last : dict of int to int
        Client -> the round whose arrays count; clients without any are missing.
    run_key : str
        Names the run for the clients' folders; drawn at random when it begins.
    """

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.run_key = secrets.token_hex(8)

    def __contains__(self, client: int) -> bool:
        return client in self.last

    def set(self, clients: Iterable[int], server_round: int) -> None:
        """Note that what some clients keep is of a round."""
        self.last |= dict.fromkeys(clients, server_round)

    def forget(self, client: int) -> None:
        """Have a client that lost what it kept begin anew."""
        self.last.pop(client, None)

    def doubt(self, client: int) -> None:
        """Keep counting on a client that failed: what it keeps is on its disk."""

    def config(self, client: int) -> dict[str, str | int]:
        """Return what a client is told: the run, and the round of its arrays that counts.

        A node with a placeholder id, as another has its partition, gets a run of its own: on one
        machine the two would keep their arrays in one folder.
        """
        run = self.run_key if client >= 0 else f"{self.run_key}-{-1 - client}"
        told: dict[str, str | int] = {wire.RUN: run}
        if client in self.last:
            told[wire.ROUND] = self.last[client]
        return told

    def state_dict(self) -> dict[str, Any]:
        """Return all but placeholder ids of clients: what their nodes keep ends with the run."""
        last = {str(k): self.last[k] for k in sorted(self.last) if k >= 0}
        return {"last": last, "run-key": self.run_key}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.last = {int(client): int(number) for client, number in state["last"].items()}
        self.run_key = str(state["run-key"])
