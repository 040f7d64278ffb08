"""Tangent features of one logit: batched, against a backward pass for each example.

SimpleCNN, 100,000 of its 421,642 coordinates (as in Yu et al. 2022) and 1,000; random pictures.
The floor is one backward pass for the sum over a batch, which gives no example's features: nothing
that differentiates all examples can be faster.

    python benchmarks/entk_features.py [--device cpu]

Writes results/entk_features.csv and .json (with _cuda for a GPU). Needs only torch and numpy.
"""

from typing import Any

import torch
from common import machine, make, measured, options, relative, timed, use_checkout, write
from torch import Tensor, nn

CASES = [
    (100_000, "loop", 100),
    (100_000, "floor", 1000),
    (100_000, "subsample", 100),
    (100_000, "subsample", 1000),
    (1000, "loop", 100),
    (1000, "subsample", 100),
    (1000, "projection", 100),
]


def loop(model: nn.Module, x: Tensor, coordinates: Tensor) -> Tensor:
    """One backward pass for each example, then its coordinates (Yu et al. 2022, appendix B)."""
    rows = torch.empty(len(x), len(coordinates), dtype=x.dtype)
    for i, example in enumerate(x):
        model.zero_grad()
        model(example.unsqueeze(0))[0, 0].backward()
        flat = torch.cat(
            [
                torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                for p in model.parameters()
            ]
        )
        rows[i] = flat[coordinates]
    return rows


def child(num_features: int, method: str, n: int, device: str) -> dict[str, Any]:
    """Measure one way."""
    use_checkout()
    from fedntk.ntk import entk_features

    model, x = make("simple-cnn", n, device)
    total = sum(p.numel() for p in model.parameters())
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:num_features]
    coordinates = drawn.sort().values.to(device)

    def floor(x: Tensor) -> None:
        for part in x.split(64):
            torch.autograd.grad(model(part)[:, 0].sum(), [*model.parameters()])

    def work(x: Tensor) -> Tensor | None:
        if method == "floor":
            return floor(x)
        if method == "loop":
            return loop(model, x, coordinates)
        return entk_features(model, x, num_features, 0, method=method)

    work(x[:2])
    found = timed(lambda: work(x), device)
    found["ms-an-example"] = 1e3 * found["seconds"] / n
    if method in ("subsample", "loop"):  # against the loop in float64
        few, rows = x[:20], work(x[:20])
        exact = loop(model.double(), few.double(), coordinates)
        found["relative-difference"] = relative(rows, exact)
    return found


def main() -> None:
    """Measure all, write, print the ratios."""
    device = options(__doc__, child).device
    rows = measured(
        __file__,
        [{"num_features": p, "method": m, "n": n, "device": device} for p, m, n in CASES],
    )
    each = {(r["num_features"], r["method"], r["n"]): r["ms-an-example"] for r in rows}
    summary = {
        "machine": machine(device),
        "times-faster-than-the-loop": {
            f"{method}, p={p}, n={n}": round(each[p, "loop", 100] / ms, 1)
            for (p, method, n), ms in each.items()
            if method != "loop"
        },
    }
    write("entk_features", rows, summary, device)


if __name__ == "__main__":
    main()
