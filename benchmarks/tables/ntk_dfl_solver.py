"""How far NTK-DFL's change of the weights is off, by the tolerance of its solver."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedntk.ntk import Jacobian, evolve, jacobian, one_hot
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup

CLIENTS = 6  # that evolve together: five neighbours and one itself
TOLERANCES = ("1e-4", "1e-3", "1e-2")


def errors(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield relative errors, beside a tolerance of 1e-7 in float64, and products of the kernel.

    The last clients evolve; before, the others change the weights, if ``evolved``.
    """
    options = {key: value for key, value in settings.items() if key not in ("evolved", "steps")}
    setup = load_setup(Config(options, seed=seed))
    model = setup.network

    def problem(clients: Any) -> tuple[Jacobian, Tensor, Tensor]:
        x, labels = setup.data.train(np.concatenate(clients))
        return jacobian(model, x), model(x).detach(), one_hot(labels, setup.data.num_classes)

    starts = range(0, setup.config.num_clients, CLIENTS)
    *others, last = (setup.split.clients[start : start + CLIENTS] for start in starts)
    flow = {"loss": "cross-entropy", "learning_rate": setup.config.learning_rate}
    for clients in others if settings["evolved"] else ():
        rows, f, y = problem(clients)
        change = rows.vjp(evolve(rows.gram(), f, y, steps=[200], **flow).residuals[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += change[name]
    rows, f, y = problem(last)
    kernel, flow = rows.gram(), {**flow, "steps": [settings["steps"]]}
    exact = evolve(kernel.double(), f.double(), y.double(), tolerance=1e-7, **flow).residuals[0]

    def norm(residuals: Tensor) -> float:
        change = rows.vjp(residuals.float()).values()
        return float(sum(tensor.square().sum() for tensor in change)) ** 0.5

    for tolerance in TOLERANCES:
        evolution = evolve(kernel, f, y, tolerance=float(tolerance), **flow)
        error = norm(evolution.residuals[0].double() - exact) / norm(exact)
        yield f"error-{tolerance}", None, 1000 * error
        yield f"products-{tolerance}", None, evolution.kernel_products
