"""SCAFFOLD's c where only models come up: who changed it, and how clients can know it.

Source: Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML
2020, option II; Yu et al., *TCT*, NeurIPS 2022, algorithm 1. Clients keep their own c_k; the server
tells their changes from the models they return:

    c_k <- c_k - c + (theta - theta_k) / (M eta),        c = sum_k n_k c_k / n over all clients.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk.convex import mean_gradient

__all__ = ["ControlVariate"]


class ControlVariate:
    """The server's c, and which round's c_k counts for each client.

    Parameters
    ----------
    span : float
        M eta.

    Attributes
    ----------
    value : float32, shape (p, C)
        c; empty while it is zero.
    """

    def __init__(self, span: float) -> None:
        self.span = span
        self.value = np.zeros((0, 0), np.float32)
        self._total = 0.0  # n that c was divided by
        self._rounds: dict[int, int] = {}  # client -> round of its c_k
        self._examples: dict[int, int] = {}
        self._full_round = -1  # the last round, if all clients took part in it

    def round_of(self, client: int) -> int:
        """Return the round whose c_k counts for a client; 0: its c_k is zero."""
        return self._rounds.get(client, 0)

    def source(self, client: int, server_round: int) -> Literal["zero", "last", "sent"]:
        """Say how a client gets to know c: see :class:`fedntk.ntk.payloads.ConvexTask`.

        ``"last"``, the difference of models, needs all clients in the last round, this one, too.
        """
        if not self.value.size:
            return "zero"
        known = self._full_round == server_round - 1 == self.round_of(client)
        return "last" if known else "sent"

    def know(self, examples: Mapping[int, int]) -> None:
        """Take note of the clients' numbers of examples; the first that a client tells counts."""
        self._examples = {**examples, **self._examples}

    def examples_of(self, client: int) -> int | None:
        """Return the number of examples that a client first told; None if it told none yet."""
        return self._examples.get(client)

    def update(
        self,
        server_round: int,
        theta: NDArray[Any],
        mean: NDArray[Any],
        clients: Mapping[int, tuple[int, NDArray[Any]]],
        everyone: set[int],
    ) -> None:
        """Take the changes of the clients' c_k into c.

        Parameters
        ----------
        server_round : int
            Now.
        theta, mean : float32, shape (p, C)
            The model before and after the round.
        clients : dict of int to (int, ndarray)
            Client id -> number of examples and returned model, of those that took part.
        everyone : set of int
            Ids of all clients that are there; those that have been count, too. One that
            never took part has c_k = 0, and counts with as many examples as the others have on
            average.
        """
        self.know({client: count for client, (count, _) in clients.items()})
        everyone = everyone | self._rounds.keys()  # who has left counts on
        counts = [n for client, n in self._examples.items() if client in everyone]
        total = len(everyone) * float(np.mean(counts)) if counts else 0.0
        began = bool(self.value.size)
        full = clients.keys() >= everyone and (not began or total == self._total)
        if full:
            before, after = torch.from_numpy(theta), torch.from_numpy(mean)
            self.value = mean_gradient(before, after, self.span).numpy()
        else:
            control = self.value.astype(np.float64) if began else np.zeros(theta.shape)
            summed = control * self._total
            for count, linear in clients.values():
                summed += count * ((theta - linear.astype(np.float64)) / self.span - control)
            self.value = (summed / total).astype(np.float32)
        self._total = total
        self._rounds |= dict.fromkeys(clients, server_round)
        self._full_round = server_round if full else -1

    def reset(self) -> None:
        """Start again from zero: a c_k that c holds is no more."""
        self.value, self._total = np.zeros((0, 0), np.float32), 0.0
        self._rounds, self._full_round = {}, -1

    def state_dict(self) -> dict[str, Any]:
        """Return all that later rounds depend on."""
        return {
            "control": self.value.copy(),
            "control-examples": self._total,
            "control-full-round": self._full_round,
            "control-rounds": [list(pair) for pair in sorted(self._rounds.items())],
            "examples": [list(pair) for pair in sorted(self._examples.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        self.value = np.array(state["control"])
        self._total = float(state["control-examples"])
        self._rounds = {int(k): int(v) for k, v in state["control-rounds"]}
        self._examples = {int(k): int(v) for k, v in state["examples"]}
        self._full_round = int(state["control-full-round"])
