"""Tracks the last accepted round of the arrays that each client keeps on its disk."""

import secrets
from typing import Any

from flwr.app import ConfigRecord

from fedntk.ntk.options import state

from .base import BaseStrategy

RUN, ROUND = "personal-run", "personal-round"  # in a message's configuration


class KeepingStrategy(BaseStrategy):
    """A strategy whose clients keep arrays of their own from round to round.

    Attributes
    ----------
    trained : dict of int to int
        Client -> the round whose arrays count; clients without any are missing.
    run_key : str
        Names the run for the clients' folders; drawn at random when it begins.
    """

    trained: dict[int, int] = state(dict)
    run_key: str = state(lambda: secrets.token_hex(8))

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Refuse: clients keep what is learned, and the owner would predict without it."""
        raise ValueError(
            f"{type(self).__name__} cannot work within a {type(owner).__name__}: models are the "
            "clients' own, and the server has none to predict with"
        )

    def state_dict(self) -> dict[str, Any]:
        """Leave out placeholder ids of clients: what their nodes keep ends with the run."""
        saved = super().state_dict()
        for name in self.states() & saved.keys():
            if isinstance(by_client := saved[name], dict):
                saved[name] = {k: own for k, own in by_client.items() if not k.startswith("-")}
        placeholders = tuple(f"{name}.-" for name in self.states())
        return {name: own for name, own in saved.items() if not name.startswith(placeholders)}

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add the name of the run."""
        super().prepare_config(config, server_round)
        config[RUN] = self.run_key

    def config_for(self, client: int, config: ConfigRecord) -> ConfigRecord:
        """Return a configuration for one client, with the round of its own that counts.

        A node with a placeholder id, as another has its partition, gets a run of its own: on one
        machine the two would keep their arrays in one folder.
        """
        own = ConfigRecord(dict(config))
        if client < 0:
            own[RUN] = f"{self.run_key}-{-1 - client}"
        if client in self.trained:
            own[ROUND] = self.trained[client]
        return own
