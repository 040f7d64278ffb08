"""How accurate each run is for each client, and which clients gain or lose against a run."""

from collections.abc import Sequence

import pandas as pd

RECENT = 5  # last rounds of a run: more clients evaluate in several rounds than in one
MARGIN = 0.01  # largest difference of accuracy that is neither gain nor loss


def newest_accuracies(clients: pd.DataFrame) -> pd.DataFrame:
    """Return each client's newest accuracy in the last five rounds of each run.

    `clients` is tidy, as :attr:`~fedntk.simulations.Run.clients`, of one or more runs. The result
    has the columns run, seed, partition, accuracy, and a row for each client that evaluated.
    """
    accuracy = clients[clients.metric == "accuracy"]
    last = accuracy.groupby(["run", "seed"])["round"].transform("max")
    recent = accuracy[accuracy["round"] > last - RECENT].sort_values("round")
    newest = recent.groupby(["run", "seed", "partition"], sort=False).value.last()
    return newest.rename("accuracy").reset_index()


def client_accuracy_table(clients: pd.DataFrame) -> pd.DataFrame:
    """Return accuracies with a row for each seed and client and a column for each run."""
    newest = newest_accuracies(clients)
    table = newest.pivot_table(index=["seed", "partition"], columns="run", values="accuracy")
    return table[list(dict.fromkeys(clients.run))]


def client_summary(clients: pd.DataFrame) -> pd.DataFrame:
    """Return mean, worst and standard deviation over the clients; one row a run.

    Each is over a seed's clients, each counting once; the result has means over the seeds, and the
    mean's standard deviation over them.
    """
    by_seed = newest_accuracies(clients).groupby(["run", "seed"], sort=False).accuracy
    spread = by_seed.std(ddof=0)
    runs = by_seed.agg(["size", "mean", "min"]).assign(std=spread).groupby("run", sort=False)
    table = runs.agg(
        mean=("mean", "mean"),
        worst=("min", "mean"),
        std=("std", "mean"),
        **{"mean-std": ("mean", "std")},
        seeds=("size", "size"),
        clients=("size", "mean"),
    )
    return table.astype({"clients": int}).loc[[*dict.fromkeys(clients.run)]].reset_index()


def client_gains(clients: pd.DataFrame, against: Sequence[str]) -> pd.DataFrame:
    """Count the clients that gain or lose with each run against the named ones.

    All have the same seeds and the same split. The result has a row for each pair of runs: clients
    that evaluated in both, shares that gain and that lose by more than 0.01, mean gain, largest
    gain and largest loss.
    """
    table, rows = client_accuracy_table(clients), []
    for other in [name for name in against if name in table]:
        for run in table.columns.drop(other):
            gain = (table[run] - table[other]).dropna()
            if len(gain):
                shares = (gain > MARGIN).mean(), (gain < -MARGIN).mean()
                ends = gain.clip(0).max(), gain.clip(None, 0).min()
                rows.append((run, other, *shares, gain.mean(), *ends, len(gain)))
    changes = ["gain", "lose", "mean-gain", "largest-gain", "largest-loss"]
    return pd.DataFrame(rows, columns=["run", "against", *changes, "clients"])
