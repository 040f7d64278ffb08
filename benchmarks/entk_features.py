"""Tangent features of one logit: batched, against a backward pass for each example.

SimpleCNN and ResNet-18 with GroupNorm, on random pictures: 100,000 coordinates (as in Yu et al.
2022, of 421,642 and 11.2 million) and 1,000; and sketches and a projection of the whole gradient.
The floor is one backward pass for the sum over a batch, which gives no example's features: nothing
that differentiates all examples can be faster. `forward-passes` is the time over that of a forward
pass of the same examples in batches of 64, the median over five turns of both in one process. The
coordinates are drawn once, before. On a CPU there is one thread.

    python benchmarks/entk_features.py [--device cpu]

Needs only torch and numpy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import make, measured, parse_options, relative, timed, use_checkout, write
from torch import Tensor, nn

TURNS = 5
CASES = [  # network, features, way, examples
    ("simple-cnn", 100_000, "loop", 100),
    ("simple-cnn", 100_000, "floor", 1000),
    ("simple-cnn", 100_000, "subsample", 100),
    ("simple-cnn", 100_000, "subsample", 1000),
    ("simple-cnn", 1000, "loop", 100),
    ("simple-cnn", 1000, "subsample", 100),
    ("simple-cnn", 4000, "sketch", 1000),
    ("simple-cnn", 1000, "projection", 100),
    ("resnet18-gn", 100_000, "loop", 32),
    ("resnet18-gn", 100_000, "floor", 32),
    ("resnet18-gn", 100_000, "subsample", 32),
    ("resnet18-gn", 4000, "sketch", 32),
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


def child(network: str, num_features: int, method: str, n: int, device: str) -> dict[str, Any]:
    use_checkout()
    from fedntk.ntk.features.tangent import TangentFeatures

    model, x = make(network, n, device)
    total = sum(p.numel() for p in model.parameters())
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:num_features]
    coordinates = drawn.sort().values.to(device)

    def floor(x: Tensor) -> None:
        for part in x.split(64):
            torch.autograd.grad(model(part)[:, 0].sum(), [*model.parameters()])

    def forward() -> None:
        with torch.no_grad():
            for part in x.split(64):
                model(part)

    way: Callable[[Tensor], Any]
    if method == "floor":
        way = floor
    elif method == "loop":
        way = partial(loop, model, coordinates=coordinates)
    else:
        way = TangentFeatures(model, num_features, 0, method=method)
    for _ in range(2):
        way(x)
        forward()
    turns = [
        [timed(work, device, at_least=0.0) for work in (lambda: way(x), forward)]
        for _ in range(TURNS)
    ]
    found = turns[0][0]
    pairs = np.array([[own["seconds"] for own in turn] for turn in turns])
    found["seconds"] = float(np.median(pairs[:, 0]))
    found["forward-passes"] = float(np.median(pairs[:, 0] / pairs[:, 1]))
    found["ms-an-example"] = 1e3 * found["seconds"] / n
    if method in ("subsample", "loop"):  # against the loop in float64
        few, rows = x[:20], way(x[:20])
        exact = loop(model.double(), few.double(), coordinates)
        found["relative-difference"] = relative(rows, exact)
    return found


def main() -> None:
    """Measure all, write, print the ratios."""
    torch.set_num_threads(1)
    device = parse_options(__doc__, child=child, device="cpu").device
    rows = measured(
        __file__,
        [
            {"network": net, "num_features": p, "method": m, "n": n, "device": device}
            for net, p, m, n in CASES
        ],
    )
    loops = {(r["network"], r["num_features"]): r for r in rows if r["method"] == "loop"}
    summary: dict[str, Any] = {"cases": {}}
    for row in rows:
        loop = loops.get((row["network"], row["num_features"]))
        case = "{network}, {method}, p={num_features}, n={n}".format(**row)
        found = {"forward-passes": round(row["forward-passes"], 1)}
        if loop:
            found["times-faster"] = round(loop["ms-an-example"] / row["ms-an-example"], 1)
        summary["cases"][case] = found
    write("entk_features", rows, summary, device)


if __name__ == "__main__":
    main()
