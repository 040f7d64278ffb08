"""Which round of what clients keep on their disks counts: the last that was accepted."""

import secrets
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord

from .base import BaseStrategy

__all__ = ["KeepingStrategy"]

RUN, ROUND = "personal-run", "personal-round"  # in a message's configuration


class KeepingStrategy(BaseStrategy):
    """A strategy whose clients keep arrays of their own from round to round.

    Attributes
    ----------
    trained : dict of int to int
        Client -> the round whose arrays count; clients that are not in it have none yet.
    run_key : str
        Names the run for the clients' folders; drawn at random when it begins.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trained: dict[int, int] = {}
        self.run_key = ""

    def state_dict(self) -> dict[str, Any]:
        """Add of which round each client's own arrays are; the clients keep these."""
        return {
            **super().state_dict(),
            "run-key": self.run_key,
            "trained": {str(k): n for k, n in sorted(self.trained.items()) if k >= 0},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.run_key = str(state["run-key"])
        self.trained = {int(client): int(n) for client, n in state["trained"].items()}

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Begin with clients that have nothing of their own, unless a state was loaded."""
        if not done:
            self.trained, self.run_key = {}, secrets.token_hex(8)
        return super().begin(initial_arrays, num_rounds, done)

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Refuse to: clients keep what is learned, and the owner would predict without it.

        Raises
        ------
        ValueError
            Always.
        """
        del everyone
        raise ValueError(
            f"{type(self).__name__} cannot work within a {type(owner).__name__}: models are the "
            "clients' own, and the server has none to predict with"
        )

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add the name of the run."""
        super().prepare_config(config, server_round)
        config[RUN] = self.run_key

    def config_for(self, client: int, config: ConfigRecord) -> ConfigRecord:
        """Return a configuration for one client, with the round of its own that counts.

        A node that goes by a placeholder id, as another has its partition, is given a run of its
        own: on one machine the two would keep their arrays in one folder.
        """
        own = ConfigRecord(dict(config))
        if client < 0:
            own[RUN] = f"{self.run_key}-{-1 - client}"
        if client in self.trained:
            own[ROUND] = self.trained[client]
        return own
