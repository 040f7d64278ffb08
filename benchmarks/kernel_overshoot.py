"""How far an update moves the linearised network, and how far each kernel foresees it.

Clients in a complete graph: in each round all evolve from the mean of the last round's weights,
each on 1,200 training images of its own, with the settings of `ntk_dfl_fmnist.toml`. The overshoot
of a round is the linearised network's change J J^T R along the direction over the classes in which
the evolved outputs f(t) - f(0) of a client change most, divided by that change: 1 where the kernel
foresees it. Accuracy is that of the mean on 5,000 other training images.

    python benchmarks/kernel_overshoot.py --data-dir FOLDER [--clients 8] [--rounds 12]
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from common import CONF, RESULTS, parse_options, write
from torch import Tensor, nn
from tqdm import tqdm

from fedntk.ntk import jacobian, one_hot
from fedntk.ntk.evolution.gradient_flow import GradientFlow
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model

EXAMPLES, HELD_OUT = 1200, 5000
# name -> kernel and steps
KERNELS = {
    "mean": ("mean", [800]),
    "corrected, 4 steps": ("corrected", [200, 400, 600, 800]),
    "corrected, 8 steps": ("corrected", list(range(100, 801, 100))),
    "full": ("full", [800]),
}


def overshoot(foreseen: Tensor, done: Tensor) -> float:
    """Change that was done by the one foreseen, along the direction that changes most."""
    centred = foreseen - foreseen.mean(1, keepdim=True)
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    a, b = foreseen @ direction, done @ direction
    return float(a @ b / (a @ a))


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def main() -> None:
    options = parse_options(__doc__, data_dir=True, clients=8, rounds=12)
    config = Config.load(CONF / "ntk_dfl_fmnist.toml", data_dir=options.data_dir)
    data = load_data(config)
    x, y = data.train(np.random.default_rng(0).permutation(len(data.y_train)))
    (x_held, x), (y_held, y) = (part.tensor_split([HELD_OUT]) for part in (x, y))
    clients = [*zip(x.split(EXAMPLES), y.split(EXAMPLES), strict=True)][: options.clients]
    rows, seconds = [], {}
    for name, (kernel, steps) in KERNELS.items():
        flow = GradientFlow(
            loss="cross-entropy",
            learning_rate=config.learning_rate,
            steps=steps,
            kernel=kernel,  # type: ignore[arg-type]
            tolerance=1e-3,
        )
        model = build_model(config, tuple(x.shape[1:]), data.num_classes)
        times, before = [], None
        for number in tqdm(range(1, options.rounds + 1), desc=name):
            start, found, over = vector(model), [], []
            for own, labels in clients:
                rows_of, targets = jacobian(model, own), one_hot(labels, data.num_classes)
                with torch.no_grad():
                    outputs = model(own)
                began = time.perf_counter()
                evolution = flow(rows_of, outputs, targets)
                times.append(time.perf_counter() - began)
                update = rows_of.vjp(evolution.residuals[-1])
                done = rows_of.jvp(update).double()
                over.append(overshoot((evolution.outputs[-1] - outputs).double(), done))
                parts = [update[key].flatten() for key, _ in model.named_parameters()]
                found.append(start + torch.cat(parts))
            with torch.no_grad():
                old = model(x_held)
                nn.utils.vector_to_parameters(torch.stack(found).mean(0), model.parameters())
                new = model(x_held)
            step, last, before = (new - old).flatten(), before, (new - old).flatten()
            rows.append({
                "kernel": name,
                "round": number,
                "accuracy": float((new.argmax(1) == y_held).double().mean()),
                "overshoot": float(np.mean(over)),
                "cosine-to-last-change": float("nan")
                if last is None
                else float(nn.functional.cosine_similarity(step, last, dim=0)),
            })  # fmt: skip
        seconds[name] = round(float(np.median(times)), 3)
    table = pd.DataFrame(rows)
    print(table.pivot(index="round", columns="kernel", values="accuracy").to_string())
    print(table.pivot(index="round", columns="kernel", values="overshoot").round(2).to_string())
    print(seconds)
    summary = {"clients": options.clients, "seconds-of-an-evolution": seconds}
    write("kernel_overshoot", table, summary)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    shown = {
        "accuracy": "accuracy of the mean model",
        "overshoot": "change done / change foreseen",
        "cosine-to-last-change": "cosine to the last round's change",
    }
    for axis, (column, label) in zip(axes, shown.items(), strict=True):
        for name in KERNELS:
            own = table[table.kernel == name]
            axis.plot(own["round"], own[column], label=name, marker=".")
        axis.set(xlabel="round", ylabel=label)
    axes[0].set_ylim(bottom=0.6)
    axes[0].legend(title="kernel", fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "kernel_overshoot.png", dpi=110)


if __name__ == "__main__":
    main()
