"""Selection of the clients' models that are averaged: accuracy against their number.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, sections 3.2 and 5. Models are sorted by their
accuracy on validation examples, and the mean of the first k is evaluated on others, for each k;
beside it in a random order, and from the worst to the best.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fedntk.ntk.support.arrays import Arrays


def selection_curves(
    models: Mapping[int, Arrays],
    validation: Callable[[Arrays], float],
    judged: Callable[[Arrays], float],
    mean_of: Callable[[Sequence[Arrays]], Arrays],
    *,
    seed: int = 0,
    points: int = 20,
) -> pd.DataFrame:
    """Average more and more of the clients' last models, in three orders, and evaluate each mean.

    `models` is client -> weights. `validation` and `judged` return the accuracy of weights on the
    examples that sort the models, and on those that judge the means; they have no example in
    common: else the best models are those of lucky examples. `seed` is of the random order, and
    means are judged at `points` numbers of clients at most. The result has the columns order,
    clients (how many are averaged), client (the last of them), accuracy.
    """
    accuracies = {client: validation(model) for client, model in sorted(models.items())}
    worst_first = sorted(accuracies, key=lambda client: accuracies[client])
    best_first = sorted(accuracies, key=lambda client: -accuracies[client])
    drawn = np.random.default_rng([seed, *b"selection"]).permutation([*accuracies]).tolist()
    orders = {"best to worst": best_first, "random": drawn, "worst to best": worst_first}
    rows = []
    for order, clients in orders.items():
        for count in numbers_averaged(len(clients), points):
            mean = mean_of([models[client] for client in clients[:count]])
            rows.append((order, count, clients[count - 1], judged(mean)))
    return pd.DataFrame(rows, columns=["order", "clients", "client", "accuracy"])


def numbers_averaged(count: int, points: int) -> list[int]:
    """Return how many clients to average: 1 ... `count`, or `points` numbers, small ones dense.

    Examples
    --------
    >>> numbers_averaged(4, 20), numbers_averaged(300, 6)
    ([1, 2, 3, 4], [1, 3, 10, 31, 96, 300])
    """
    if count <= points:
        return list(range(1, count + 1))
    return sorted({*np.rint(np.geomspace(1, count, max(points, 2))).astype(int).tolist()})
