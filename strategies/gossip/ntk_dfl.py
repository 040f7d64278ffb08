"""NTK-DFL: clients send each other Jacobians, and each evolves weights of its own.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, section 3 and algorithms 1 to 4, for client i with
the neighbours N_i of round k:

    w̄_i = (N_i w_i + sum over j of N_j w_j) / (N_i + sum over j of N_j)       eq. (1)
    J_{i,j} = d f(X_i; w̄_j) / d w, f(X_i; w̄_j), Y_i   go to each neighbour j   eq. (2)
    H_i, f^(t) from all J_{j,i} and the own; w_i = w̄_i + J^T R(t)              eq. (3) to (5)

Three exchanges a round: the averages, the Jacobians, and the new weights that the next round begins
with; two more for each further one of m_1 batches (appendix E.1). All members of a cluster have the
same average. So one of them, the hub, can form it and evolve for all (appendix E.2): each member
sends one Jacobian, and takes the hub's new weights, in a fourth exchange.
"""

from typing import Any

from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.gossip_options import MixingMatrix, NeighbourScreening, NTKDFLOptions
from fedntk.ntk.payloads.uploads import compresses

from .relay import RelayStrategy, Step


class NTKDFL(NTKDFLOptions, RelayStrategy):
    """NTK-DFL (Thompson et al. 2025). Clients are :class:`~fedntk.clients.NTKDFLClient`."""

    client = "NTKDFLClient"
    rules = ("none", "leave-one-out")

    evolve_once: bool = option(
        "with clusters: one member, drawn anew in each round, averages and evolves for its cluster "
        "(appendix E.2); selection = own then takes the t of its own examples",
        default=False,
    )
    real_targets: bool = argument("whether clients have real targets, not classes", default=False)

    def check(self) -> None:
        """Refuse one evolution for clients that have no average in common."""
        if self.real_targets and compresses(self.sparsity, self.bits):
            raise ValueError(
                "real_targets: compressed rows have labels; expected sparsity = 0 and bits = 32"
            )
        if self.evolve_once and (self.topology.kind != "clustered" or not self.average_first):
            raise ValueError("evolve_once: expected clusters whose members average_first")

    @property
    def mixing(self) -> MixingMatrix:
        """How clients count in averages."""
        return self._neighbour_screening.mixing

    @property
    def _neighbour_screening(self) -> NeighbourScreening:
        return NeighbourScreening(rule=self.screening.rule, malicious=self.screening.malicious)

    def told_options(self) -> dict[str, Any]:
        """Return the options, and how clients bear malicious neighbours."""
        return {**self.to_config(), **self._neighbour_screening.to_config()}

    @property
    def agreed_loss(self) -> str:
        """The loss that evolves."""
        return self.loss

    @property
    def _has_hubs(self) -> bool:
        """Whether one member of each cluster averages and evolves for all."""
        return self.evolve_once

    def plan(self, *, first: bool) -> list[Step]:
        """Return the exchanges: weights where none are there yet, averages, then each batch's."""
        steps = [Step("weights")] if first else []
        if self.average_first:
            steps.append(Step("average"))
        for batch in range(self.batches):
            steps += [Step("jacobians", batch), Step("evolve", batch)]
        return [*steps, Step("adopt")] if self.evolve_once else steps
