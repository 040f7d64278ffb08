"""Distance of NTK's weights from those of gradient descent: Yue et al. 2022, figure 9."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad

from fedntk.ntk import evolve, jacobian, one_hot
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model


def distance(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, int | None, float]]:
    """Yield by t the l1 norm of the difference, or the bound of eq. (25e) with coefficient 2.

    The loss is half the squared error, mean over examples and outputs, as in eq. (10).
    """
    config = Config(
        {"dataset": settings["dataset"], "model": "mlp", "width": settings["width"]},
        data_dir=settings["data-dir"], seed=seed,
    )  # fmt: skip
    data, last = load_data(config), settings["steps"]
    drawn = np.random.default_rng(seed).permutation(len(data.y_train))[: settings["examples"]]
    x, labels = data.train(drawn)
    y = one_hot(labels, data.num_classes)
    model = build_model(config, data.input_shape, data.num_classes).eval()
    first = {name: p.detach() for name, p in model.named_parameters()}
    outputs = functional_call(model, first, (x,))
    tangents, rate = jacobian(model, x), settings["learning-rate"]
    times = [t for t in range(1, last + 1) if t % max(last // 20, 1) == 0]
    bounded = settings["kernel"] == "bound"
    evolution = evolve(
        tangents, outputs, y, loss="mse", learning_rate=rate, residuals="sum",
        kernel="mean" if bounded else settings["kernel"],
        steps=range(1, last + 1) if bounded else times,
    )  # fmt: skip
    if bounded:
        largest = (y - evolution.outputs).abs().flatten(1).amax(1).cumsum(0)
        gaps_by_step = {t: 2 * float(largest[t - 2]) if t > 1 else 0.0 for t in times}
    else:
        gradient = grad(lambda w: ((functional_call(model, w, (x,)) - y) ** 2).mean() / 2)
        weights, gaps_by_step = first, {}
        for t in range(1, last + 1):
            slopes = gradient(weights)
            weights = {name: w - rate * slopes[name] for name, w in weights.items()}
            if t in times:
                update = tangents.vjp(evolution.residuals[times.index(t)])
                gaps = [(first[n] + update[n] - w).abs().sum() for n, w in weights.items()]
                gaps_by_step[t] = float(torch.stack(gaps).sum())
    for t, value in gaps_by_step.items():
        yield "distance", t, value
    yield "end", None, value
