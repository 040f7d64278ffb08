"""Accuracies of clients' own models in %, by each client's newest evaluation."""

import numpy as np
import pandas as pd

from fedntk.simulations import Run
from fedntk.simulations.report.statistics import client_summary


def of_trained(run: Run) -> pd.DataFrame:
    """Return the evaluations of the clients that train: all but the held-out ones."""
    trained = run.config.num_clients - run.config.validation_clients
    return run.clients[run.clients.partition < trained]


def mean(run: Run) -> dict[int, float]:
    """Return the mean over the clients that train."""
    return {-1: 100 * client_summary(of_trained(run))["mean"].iloc[0]}


def worst(run: Run) -> dict[int, float]:
    """Return the lowest accuracy of a client that trains."""
    return {-1: 100 * client_summary(of_trained(run))["worst"].iloc[0]}


def deviation(run: Run) -> dict[int, float]:
    """Return the standard deviation over the clients that train."""
    return {-1: 100 * client_summary(of_trained(run))["std"].iloc[0]}


def new_clients(run: Run) -> dict[int, float]:
    """Return the mean over the held-out clients; NaN if there are none."""
    clients = run.clients.drop(of_trained(run).index)
    return {-1: 100 * client_summary(clients)["mean"].iloc[0] if len(clients) else np.nan}


def rate(run: Run) -> dict[int, float]:
    """Return the learning rate; NaN if the method trains no network."""
    return {-1: np.nan if run.config.method == "one-exchange" else run.config.learning_rate}


def option(run: Run) -> dict[int, float]:
    """Return the method's temperature or the strength of its penalty; NaN without one."""
    values = run.config.values()
    for name in ("weighted-fedavg.temperature", "ditto.pull", "fed-proto.pull"):
        if name in values:
            return {-1: values[name]}
    return {-1: np.nan}
