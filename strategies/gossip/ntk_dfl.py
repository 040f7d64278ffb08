"""NTK-DFL: clients send each other Jacobians, and each evolves weights of its own.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, section 3 and algorithms 1 to 4, for client i with
the neighbours N_i of round k:

    w̄_i = (N_i w_i + sum over j of N_j w_j) / (N_i + sum over j of N_j)       eq. (1)
    J_{i,j} = d f(X_i; w̄_j) / d w, f(X_i; w̄_j), Y_i   go to each neighbour j   eq. (2)
    H_i, f^(t) from all J_{j,i} and the own; w_i = w̄_i + J^T R(t)              eq. (3) to (5)

Three exchanges a round: the averages, the Jacobians, and the new weights that the next round begins
with. With m_1 batches (appendix E.1) two more for each further batch.

All members of a cluster have the same average. So one of them, the hub, can form it and evolve for
all (appendix E.2): each member sends one Jacobian, and takes the hub's new weights, in a fourth
exchange.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import NetworkPredictor, Predictor
from fedntk.ntk.payloads import UNQUANTISED, Agreement, EvolutionTask

from ..core.averaging import named_arrays
from ..core.exchange import logger
from .relay import FROM, RelayStrategy, Step

__all__ = ["NTKDFL"]


class NTKDFL(RelayStrategy):
    """NTK-DFL (Thompson et al. 2025). Clients are :class:`~fedntk.clients.NTKDFLClient`.

    Parameters
    ----------
    learning_rate : float
        eta.
    learning_rate_decay : float
        In round k the rate is eta exp(-decay (k - 1)). The paper has none, its authors' program
        0.07.
    steps : sequence of float
        The grid of t.
    loss : {"cross-entropy", "mse"}
        That evolves. The paper's closed form is MSE's; its program runs cross-entropy.
    kernel : {"mean", "corrected", "full"}
        One kernel for all outputs, as in eq. (3); the same, but with the outputs of the exact
        linearised network at each of the `steps`, which learns in fewer rounds: keep these few; or
        all outputs coupled: see :class:`~fedntk.ntk.evolution.GradientFlow`.
    selection : {"last", "true-loss", "own"}
        Which t. The paper's rule, the lowest loss of the evolved outputs, always takes the last
        one, since that loss only falls: ``"last"``. ``"true-loss"``, as the authors' program: the
        lowest loss of the network itself over the neighbourhood. The inputs then travel with the
        Jacobians, which hold them anyway where the first layer is linear. ``"own"``: the lowest
        loss over the client's own examples.
    batches : int
        m_1 of appendix E.1: clients divide their examples, and evolve once for each part.
    average : bool
        Whether clients average their weights with their neighbours' first: eq. (1).
    class_prior : bool
        Whether the classes' shares in a neighbourhood are taken out of what its client learns
        (ours): see :func:`~fedntk.ntk.class_prior.log_class_prior`. For cross-entropy.
    sparsity : float
        Share of the numbers of each tensor of a Jacobian that clients drop before they send it
        (appendix E.3: 0.5), as in :meth:`fedntk.ntk.CompressedUpload.compress`.
    bits : int
        Of each number that stays (appendix E.3: 6), 1 ... 16; 32 leaves them as they are.
    residuals : {"integral", "sum"}
        R(t) over time: the paper's sum over whole steps, or its limit of small steps, which is
        stable at any rate; see :func:`fedntk.ntk.evolve`.
    kernel_dtype : {"outputs", "bfloat16"}
        In which clients multiply their kernels: ``"bfloat16"`` is two to three times as fast on
        CPUs that have it: see :class:`~fedntk.ntk.evolution.GradientFlow`.
    tolerance : float
        Of the clients' solver, as there. With ``"bfloat16"`` use 1e-2: its products are no better.
    evolve_once : bool
        With clusters: whether one member, drawn anew in each round, averages and evolves for its
        cluster, as in appendix E.2. With ``"own"`` t is that of its own examples.
    same_weights : bool
        Whether all clients begin with the initial arrays, or each with weights of its own, drawn
        as He et al. 2015.
    **options
        Of :class:`~fedntk.strategies.gossip.relay.RelayStrategy` (topology, collect), of
        :class:`~fedntk.strategies.BaseStrategy` (seed, min_completed) and of Flower's FedAvg.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> NTKDFL(learning_rate=0.01).task.steps[-1]
    800.0
    """

    client = "NTKDFLClient"

    def __init__(
        self,
        *,
        learning_rate: float = 0.01,
        learning_rate_decay: float = 0.0,
        steps: Sequence[float] = tuple(range(100, 801, 100)),
        loss: str = "cross-entropy",
        kernel: str = "mean",
        selection: str = "last",
        batches: int = 1,
        average: bool = True,
        class_prior: bool = False,
        sparsity: float = 0.0,
        bits: int = UNQUANTISED,
        residuals: str = "integral",
        kernel_dtype: str = "outputs",
        tolerance: float = 1e-3,
        evolve_once: bool = False,
        same_weights: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.task = EvolutionTask(
            loss=loss,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            steps=tuple(steps),
            kernel=kernel,  # type: ignore[arg-type]
            selection=selection,  # type: ignore[arg-type]
            batches=batches,
            average=average,
            class_prior=class_prior,
            sparsity=sparsity,
            bits=bits,
            residuals=residuals,  # type: ignore[arg-type]
            kernel_dtype=kernel_dtype,  # type: ignore[arg-type]
            tolerance=tolerance,
        )
        if not 0 <= learning_rate_decay < math.inf:
            raise ValueError(
                "learning_rate_decay: expected a finite number of at least 0, got "
                f"{learning_rate_decay}"
            )
        if evolve_once and (self.topology.kind != "clustered" or not average):
            raise ValueError(
                "evolve_once: expected clusters whose members average their weights; set "
                "topology = 'clustered' and average = True, or leave it out"
            )
        self.learning_rate_decay = learning_rate_decay
        self.evolve_once = evolve_once
        self._hubs: frozenset[int] = frozenset()
        self._clusters: dict[
            int, tuple[int, ...]
        ] = {}  # the round's graph, all in a cluster joined
        self.same_weights = same_weights
        self.mixing = "examples" if average else None

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> NTK-DFL: %s loss, learning rate %g, t in %s by %s, %s topology",
            self.task.loss,
            self.task.learning_rate,
            self.task.steps,
            self.task.selection,
            self.topology.kind,
        )

    def agreement(self) -> Agreement:
        """Add the loss."""
        return replace(super().agreement(), loss=self.task.loss)

    def settings(self) -> dict[str, Any]:
        """Add how clients evolve."""
        return {
            **super().settings(),
            **self.task.to_config(),
            "learning_rate_decay": self.learning_rate_decay,
            "same_weights": self.same_weights,
            "evolve_once": self.evolve_once,
        }

    def predictor(
        self, arrays: ArrayRecord | Mapping[str, NDArray[Any]], network: nn.Module
    ) -> Predictor:
        """Make the predictor of the mean model, with the loss that evolves."""
        return NetworkPredictor.from_arrays(network, named_arrays(arrays), loss=self.task.loss)

    def steps(self, *, first: bool) -> Sequence[Step]:
        """Return the exchanges: weights where none are there yet, averages, then each batch's."""
        planned = [Step("weights")] if first else []
        if self.task.average:
            planned.append(Step("average"))
        for batch in range(self.task.batches):
            planned += [Step("jacobians", batch), Step("evolve", batch)]
        return [*planned, Step("adopt")] if self.evolve_once else planned

    def graph(self, server_round: int, clients: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return who exchanges parcels with whom; where hubs evolve, members do with them alone."""
        self._clusters = super().graph(server_round, clients)
        if not self.evolve_once:
            return self._clusters
        stars = self.topology.hubs(server_round, self._clusters)
        self._hubs = frozenset(stars)
        return stars | {member: (hub,) for hub, members in stars.items() for member in members}

    def averaging_graph(self) -> dict[int, tuple[int, ...]]:
        """Return with whom clients average: a cluster's members all do, though its hub does it."""
        return self._clusters

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add whether the client is a hub; who is none has nothing to average."""
        content = super().content_for(client, stage, arrays, config)
        if self.evolve_once and stage == MessageType.TRAIN:
            content.config_records[self.configrecord_key]["hub"] = client in self._hubs
            if client not in self._hubs and self._step.name == "average":
                for name in [n for n in content.array_records if n.startswith(FROM)]:
                    del content[name]
        return content

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add how clients evolve in this round."""
        super().prepare_config(config, server_round)
        rate = self.task.learning_rate * math.exp(-self.learning_rate_decay * (server_round - 1))
        for key, value in replace(self.task, learning_rate=rate).to_config().items():
            config[key] = value
        config["same-weights"] = self.same_weights
