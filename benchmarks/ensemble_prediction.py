"""Five models predict: one pass over their stacked weights against five passes, on one thread.

    python benchmarks/ensemble_prediction.py

Both are timed in turns, and the smaller of seven times of each counts. Errors are against float64.
Writes beside this file results/ensemble_prediction.json.
"""

import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedntk.ntk import EnsemblePredictor, NetworkPredictor
from fedntk.simulations import Config
from fedntk.simulations.models import build_model
from fedntk.simulations.report.results import machine

MODELS = 5
CASES = [
    (model, shape, n)
    for model, shape, sizes in (
        ("mlp", (1, 28, 28), (1, 32, 256)),
        ("lenet", (1, 28, 28), (1, 32, 256)),
        ("simple-cnn", (1, 28, 28), (1, 32, 256)),
        ("resnet18", (3, 32, 32), (1, 8)),
    )
    for n in sizes
]


def measured(model: str, shape: tuple[int, ...], n: int) -> dict[str, Any]:
    """Time both ways on n examples, and compare each with float64."""
    networks = [build_model(Config(model=model, seed=k), shape, 10) for k in range(MODELS)]
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))
    ways = {
        name: EnsemblePredictor(map(NetworkPredictor, networks), batched=name == "stacked")
        for name in ("passes", "stacked")
    }
    exact = torch.stack([_scores(network, x) for network in networks])
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(7):
        for name, ensemble in ways.items():
            start = time.perf_counter()
            ensemble.scores(x)
            best[name] = min(best[name], time.perf_counter() - start)
    row: dict[str, Any] = {"model": model, "examples": n}
    for name, ensemble in ways.items():
        row[f"ms-{name}"] = round(1000 * best[name], 3)
        row[f"error-{name}"] = float((ensemble.scores(x).double() - exact).norm() / exact.norm())
    row["stacked-over-passes"] = round(best["stacked"] / best["passes"], 2)
    return row


@torch.no_grad()
def _scores(network: nn.Module, x: Tensor) -> Tensor:
    scores: Tensor = copy.deepcopy(network).double().eval()(x.double())
    return scores


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        rows.append(measured(*case))
        print(rows[-1], flush=True)
    path = Path(__file__).parent / "results" / "ensemble_prediction.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
