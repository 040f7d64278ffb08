"""Each client's part in a model that is solved from kept sums, and clients that harm it.

Beyond the papers: see :mod:`fedntk.ntk.convex.ledger`.
"""

from collections.abc import Sequence
from logging import getLogger

import torch
from flwr.app import ArrayRecord

from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples, are_possible, find_harmful
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.options import Declared, option, state
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics

from .kept_sums import KeptSums, SumsOnDisk
from .replies import UNUSABLE
from .sums import FeatureSums, Sums, add_up

logger = getLogger("flwr")


class Ledger(Declared):
    """Removes clients that harm the model before it is solved for.

    It needs each client's sums (:class:`.KeptSums`) and validation examples of the server
    (:class:`.FeatureSums`). Features must depend on no statistic of the clients, as in OneExchange.

    Attributes
    ----------
    removed : tuple of int
        Clients whose sums are kept, but not in the model.
    """

    alpha: float = option(
        "clients are removed if their harm on the validation examples, or the precision that they "
        "claim, is beyond what honest clients with as many examples of each class have, or if no "
        "examples have their sums; if all are honest, one is removed with probability alpha or "
        "less",
        default=0.05,
        above=0,
        below=1,
        kw_only=False,
    )
    removed: tuple[int, ...] = state(tuple)

    def without_harmful(self, storage: KeptSums, arrays: ArrayRecord) -> Sums | None:
        """Remove harmful clients; return the sums of the others, None if they have none."""
        sums, summed = storage.sums, storage.summed
        try:
            every = clients_sums(storage, summed).items()
            possible = [client for client, part in every if are_possible(part)]
            reasons = {k: "no examples have its sums" for k in summed if k not in possible}
            _, _, ridge = sums.solve(add_up(storage.of(possible).values()), arrays)
            ledger, examples = client_ledger(sums, arrays, ridge)
            harmful = find_harmful(ledger, clients_sums(storage, possible), examples, self.alpha)
            for client, score in harmful.items():
                reasons[client] = (
                    f"its harm or weight is {score:.1f} standard deviations over that of an honest "
                    "client"
                )
            self.removed = tuple(sorted(reasons))
            storage.drop(self.removed)
            total = add_up(storage.of(storage.summed).values())
        except (*UNUSABLE, TypeError) as error:  # the latter with no possible sums
            logger.warning("no solution (%s): the model stays as it was", error)
            return None
        for client, reason in sorted(reasons.items()):
            logger.warning("client %d is removed: %s", client, reason)
        return total


def clients_sums(storage: KeptSums, clients: Sequence[int]) -> SumsOnDisk[FeatureStatistics]:
    """Return the kept sums of clients, over all their examples."""
    parse = storage.sums.parse
    return SumsOnDisk(storage.run_folder, clients, lambda arrays: parse(arrays).everyone)


def client_ledger(
    sums: FeatureSums, arrays: ArrayRecord, ridge: float
) -> tuple[ClientLedger, ValidationExamples]:
    """Return the ledger of models with this ridge, and the examples that judge harm."""
    parts, labels = sums.validation_features(arrays)
    features, classes = torch.cat(list(parts)).cpu(), sums.problem.num_classes
    fixed_point = sums.fixed_point

    def equations(of: FeatureStatistics) -> NormalEquations:
        scaled = of if fixed_point is None else of.scaled(fixed_point)
        return sums.problem.equations(scaled, None)[1]

    held_out = FeatureStatistics.of([features], labels, classes)
    validation = sums.problem.equations(held_out, None)[1]
    ones = torch.ones(len(features), len(validation.gram) - features.shape[1])
    rows = torch.cat([features, ones], 1)
    examples = ValidationExamples(rows, labels, classes, fixed_point)
    return ClientLedger(equations, ridge, validation), examples
