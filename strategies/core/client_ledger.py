"""Each client's part in a model that is solved from kept sums, and clients that harm it.

Beyond the papers: see :mod:`fedntk.ntk.convex.ledger`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord

from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples, are_possible, find_harmful
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics

from .exchange import UNUSABLE, logger
from .feature_sums import Sums, SumsStrategy, add_up
from .kept_sums import KeptSums


class LedgerStrategy(SumsStrategy):
    """A strategy with a ledger of its clients; features depend on no statistic of theirs."""

    remove_harmful: float = option(
        "alpha: with keep_sums and validation, clients are removed before the model is solved if "
        "their harm on the validation examples, or the precision that they claim, is beyond what "
        "honest clients with as many examples of each class have, or if no examples have their "
        "sums; if all are honest, one is removed with probability alpha or less; 0: nobody is",
        default=0.0,
        at_least=0,
        below=1,
    )
    removed: tuple[int, ...] = state(tuple)  # clients whose sums are kept, but not in the model

    def check(self) -> None:
        """Refuse to remove clients whose sums are not kept."""
        super().check()
        if self.remove_harmful and not self.keep_sums:
            raise ValueError(
                "remove_harmful: expected keep_sums, as each client's sums are needed; with "
                "secure_aggregation the server has none, and cannot remove a client"
            )

    @classmethod
    def validated(cls, options: Any) -> str:
        """Add the judgement of harm."""
        return "remove_harmful" if options.remove_harmful else super().validated(options)

    def kept_clients(self, clients: Sequence[int]) -> KeptSums[FeatureStatistics]:
        """Return the kept sums of clients, over all their examples."""
        return KeptSums(self.kept_folder, clients, lambda own: self.parse_sums(own).everyone)

    def without(
        self, clients: Sequence[int], arrays: ArrayRecord, *, restored: Sequence[int] = ()
    ) -> ArrayRecord:
        """Do as :meth:`.SumsStrategy.without`; clients `restored` come back.

        These are some of those that `remove_harmful` has `removed`.
        """
        if odd := sorted(set(restored) - set(self.removed)):
            raise ValueError(f"restored: expected some of {self.removed}, got {odd}")
        return self.solve_again(add_up(self.kept_without(clients, restored).values()), arrays)

    def ledger(self, arrays: ArrayRecord, ridge: float) -> tuple[ClientLedger, ValidationExamples]:
        """Return the ledger of models with this ridge, and the examples that judge harm."""
        parts, labels = self.validation_features(arrays)
        features, classes = torch.cat(list(parts)).cpu(), self.sum_format.num_classes
        fixed_point = self.fixed_point

        def equations(sums: FeatureStatistics) -> NormalEquations:
            return self.normal_equations(sums.scaled(fixed_point) if fixed_point else sums)[1]

        held = FeatureStatistics.of([features], labels, classes)
        validation = self.normal_equations(held)[1]
        ones = torch.ones(len(features), len(validation.gram) - features.shape[1])
        own = ValidationExamples(torch.cat([features, ones], 1), labels, classes, fixed_point)
        return ClientLedger(equations, ridge, validation), own

    def without_harmful(self, metrics: MetricRecord) -> list[Sums]:
        """Return the sums of all but the removed clients, none if they are too few."""
        try:
            every = self.kept_clients(self.summed).items()
            possible = [client for client, own in every if are_possible(own)]
            reasons = {k: "no examples have its sums" for k in self.summed if k not in possible}
            total = add_up(self.kept(possible).values())
            _, _, ridge = self.solve_sums(total, self.global_arrays)
            ledger, examples = self.ledger(self.global_arrays, ridge)
            honest = self.kept_clients(possible)
            found = find_harmful(ledger, honest, examples, self.remove_harmful)
            said = "its harm or weight is {:.1f} standard deviations over that of an honest client"
            reasons |= {client: said.format(score) for client, score in found.items()}
            self.removed = tuple(sorted(reasons))
            self.summed = tuple(client for client in self.summed if client not in reasons)
            total = add_up(self.kept(self.summed).values())
        except (*UNUSABLE, TypeError) as error:  # the latter with no possible sums
            logger.warning("no solution (%s): the model stays as it was", error)
            return []
        for client, reason in sorted(reasons.items()):
            logger.warning("client %d is removed: %s", client, reason)
        metrics["clients-removed"] = len(reasons)
        return [total] if self.enough(len(self.summed)) else []
