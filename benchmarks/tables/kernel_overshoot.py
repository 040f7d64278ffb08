"""How far an update moves the linearised network, and how far each kernel foresees it."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedntk.ntk import jacobian, one_hot
from fedntk.ntk.evolution.gradient_flow import GradientFlow
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model

SHOWN = (1, 2, 3, 5, 8, 12)  # in the table


def rounds(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, int | None, float]]:
    """Yield accuracy, overshoot and the cosine to the last change of each round, and seconds."""
    keys = ("dataset", "data-dir", "model", "width", "learning-rate")
    config = Config({key: settings[key] for key in keys}, seed=seed)
    data = load_data(config)
    x, y = data.train(np.random.default_rng(seed).permutation(len(data.y_train)))
    held_out, examples = settings["held-out"], settings["examples"]
    (x_held, x), (y_held, y) = (part.tensor_split([held_out]) for part in (x, y))
    clients = [*zip(x.split(examples), y.split(examples), strict=True)][: settings["clients"]]
    flow = GradientFlow(
        loss="cross-entropy", learning_rate=config.learning_rate, steps=settings["steps"],
        kernel=settings["kernel"], tolerance=1e-3,
    )  # fmt: skip
    model = build_model(config, tuple(x.shape[1:]), data.num_classes)
    seconds, means, before = [], [], None
    for number in range(1, settings["rounds"] + 1):
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        weights, overshoots = [], []
        for inputs, labels in clients:
            rows, targets = jacobian(model, inputs), one_hot(labels, data.num_classes)
            with torch.no_grad():
                outputs = model(inputs)
            began = time.perf_counter()
            evolution = flow(rows, outputs, targets)
            seconds.append(time.perf_counter() - began)
            update = rows.vjp(evolution.residuals[-1])
            foreseen = (evolution.outputs[-1] - outputs).double()
            overshoots.append(overshoot(foreseen, rows.jvp(update).double()))
            parts = [update[key].flatten() for key, _ in model.named_parameters()]
            weights.append(start + torch.cat(parts))
        with torch.no_grad():
            old = model(x_held)
            nn.utils.vector_to_parameters(torch.stack(weights).mean(0), model.parameters())
            new = model(x_held)
        accuracy = 100 * float((new.argmax(1) == y_held).double().mean())
        means.append(float(np.mean(overshoots)))
        yield "accuracy", number, accuracy
        yield "overshoot", number, means[-1]
        if number in SHOWN:
            yield "after", number, accuracy
        last, before = before, (new - old).flatten()
        if last is not None:
            yield "cosine", number, float(nn.functional.cosine_similarity(before, last, dim=0))
    late = means[settings["rounds"] // 2 :]
    yield "least", None, min(late)
    yield "most", None, max(late)
    yield "evolution", None, float(np.median(seconds))


def overshoot(foreseen: Tensor, done: Tensor) -> float:
    """Return the change that was done over the one foreseen, along the direction of most change."""
    centred = foreseen - foreseen.mean(1, keepdim=True)
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    a, b = foreseen @ direction, done @ direction
    return float(a @ b / (a @ a))
