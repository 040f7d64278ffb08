"""Accuracy of a run with malicious clients, as a share."""

from fedntk.simulations import Run
from fedntk.simulations.attacks import choose_liars
from fedntk.simulations.engine.building import load_setup


def accuracy(run: Run) -> dict[int, float]:
    """Return that of the model, or the mean of the clients' own but for the first two liars."""
    if not run.config.private_test:
        return {-1: float(run.summary["accuracy"])}
    sizes = [len(places) for places in load_setup(run.config).split.clients]
    clients = run.clients[run.clients.metric == "accuracy"]
    honest = ~clients.partition.isin(choose_liars(2, sizes, run.config.seed))
    return {-1: float(clients[honest & (clients["round"] == run.config.rounds)].value.mean())}
