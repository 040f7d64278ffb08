"""Each client's part in a model that is solved from kept sums, and clients that harm it.

Beyond the papers: see :mod:`fedntk.ntk.convex.ledger`.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from logging import WARNING

import torch
from flwr.app import ArrayRecord, MetricRecord

from fedntk.ntk import NotEnoughMemory
from fedntk.ntk.convex import (
    ClientLedger,
    NormalEquations,
    ValidationExamples,
    are_possible,
    find_harmful,
)
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads import FeatureStatistics, SplitStatistics

from .exchange import logger
from .feature_sums import Sums, SumsStrategy


class KeptClients(Mapping[int, FeatureStatistics]):
    """Sums over all examples of some clients, each read from the disk when it is asked for."""

    def __init__(self, strategy: SumsStrategy, clients: Sequence[int]) -> None:
        self.strategy, self.clients = strategy, clients

    def __getitem__(self, client: int) -> FeatureStatistics:
        own = next(self.strategy.read_kept([client])[0])
        return own.everyone if isinstance(own, SplitStatistics) else own

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


class LedgerStrategy(SumsStrategy):
    """A strategy with a ledger of its clients; features depend on no statistic of theirs."""

    remove_harmful: float = option(
        "alpha: with keep_sums and validation, clients are removed before the model is solved if "
        "their harm on the validation examples is beyond what honest clients with as many examples "
        "of each class do, or if no examples have their sums; if all are honest, one is removed "
        "with probability alpha or less; 0: nobody is",
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

    def check_validation(self) -> None:
        """Refuse to judge harm without examples."""
        super().check_validation()
        if self.remove_harmful and self.validation is None:
            raise ValueError(
                "remove_harmful: expected validation, examples on the server, got none"
            )

    def ledger(
        self, arrays: ArrayRecord, ridge: float, fixed_point: FixedPoint | None
    ) -> tuple[ClientLedger, ValidationExamples]:
        """Return the ledger of models with this ridge, and the examples that judge harm.

        `fixed_point` is what :meth:`read_kept` returns with the sums.
        """
        parts, labels = self.validation_features(arrays)
        features, classes = torch.cat(list(parts)).cpu(), self.sum_format(None).num_classes

        def equations(sums: FeatureStatistics) -> NormalEquations:
            return self.normal_equations(sums.scaled(fixed_point) if fixed_point else sums)[1]

        held = FeatureStatistics.of([features], labels, classes)
        validation = self.normal_equations(held)[1]
        ones = torch.ones(len(features), len(validation.gram) - features.shape[1])
        examples = ValidationExamples(torch.cat([features, ones], 1), labels, classes)
        return ClientLedger(equations, ridge, validation), examples

    def without_harmful(self, metrics: MetricRecord) -> list[Sums]:
        """Return the sums of all but the removed clients, none if they are too few."""
        try:
            kept = KeptClients(self, self.summed)
            possible = [client for client, own in kept.items() if are_possible(own)]
            reasons = {k: "no examples have its sums" for k in self.summed if k not in possible}
            sums, fixed_point = self.read_kept(possible)
            total = functools.reduce(operator.add, sums)
            _, _, ridge = self.solve_sums(total, fixed_point, self.global_arrays)
            ledger, examples = self.ledger(self.global_arrays, ridge, fixed_point)
            honest = KeptClients(self, possible)
            found = find_harmful(ledger, honest, examples, self.remove_harmful)
            said = "its harm is {:.1f} standard deviations over that of an honest client"
            reasons |= {client: said.format(score) for client, score in found.items()}
            self.removed = tuple(sorted(reasons))
            self.summed = tuple(client for client in self.summed if client not in reasons)
            total = functools.reduce(operator.add, self.read_kept(self.summed)[0])
        except (ArithmeticError, ValueError, TypeError, NotEnoughMemory) as error:
            logger.log(WARNING, "no solution (%s): the model stays as it was", error)
            return []
        for client, reason in sorted(reasons.items()):
            logger.log(WARNING, "client %d is removed: %s", client, reason)
        metrics["clients-removed"] = len(reasons)
        return [total] if self.enough(len(self.summed)) else []
