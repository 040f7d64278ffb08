"""Norm of each example's gradient: from factors, beside a training step, Opacus and vmap.

ResNet-18 with GroupNorm for 32 x 32 images, random pictures, cross-entropy, evaluation mode. The
ways alternate with a training step (the gradient of the mean loss), each in a process of its own,
so that a ratio compares runs of the same minute; it is the median over the repetitions. Seconds
are CPU time of one thread, because other programs may be at work. Opacus needs training mode, which
makes no difference to this network.

    python benchmarks/gradient_norms.py

Needs torch, numpy and, for its rows, Opacus.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import make, measured, parse_options, timed, use_checkout, write
from torch import Tensor, nn

WAYS = ("factors", "opacus", "vmap, 16 at a time")
CASES = [(way, batch, times) for batch, times in ((32, 3), (128, 2)) for way in WAYS]
Norms = Callable[[Tensor, Tensor], Tensor]


def by_opacus(model: nn.Module) -> Norms:
    """Opacus' fast gradient clipping: ghost norms of the layers for which it has them."""
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )

    wrapped = GradSampleModuleFastGradientClipping(model.train(), loss_reduction="sum")

    def norms(x: Tensor, y: Tensor) -> Tensor:
        wrapped.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        return wrapped.get_norm_sample()

    return norms


def by_vmap(model: nn.Module) -> Norms:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, parameters, (example.unsqueeze(0),))
        return nn.functional.cross_entropy(outputs, label.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def norms(x: Tensor, y: Tensor) -> Tensor:
        found = []
        for part in zip(x.split(16), y.split(16), strict=True):
            rows = [g.flatten(1).norm(dim=1) for g in gradients(parameters, *part).values()]
            found.append(torch.stack(rows).norm(dim=0))
        return torch.cat(found)

    return norms


def child(way: str, batch: int, times: int) -> dict[str, Any]:
    use_checkout()
    from fedntk.ntk import gradient_norms

    torch.set_num_threads(1)
    model, x = make("resnet18-gn", batch, "cpu")
    y = torch.randint(10, (batch,))
    loss = nn.CrossEntropyLoss(reduction="none")
    plain = copy.deepcopy(model)
    exact = gradient_norms(copy.deepcopy(model).double(), x[:4].double(), y[:4], loss)

    def step() -> None:
        torch.autograd.grad(loss(plain(x), y).mean(), list(plain.parameters()))

    def by_factors(x: Tensor, y: Tensor) -> Tensor:
        return gradient_norms(model, x, y, loss)

    makers = {"opacus": by_opacus, "vmap, 16 at a time": by_vmap}
    norms = makers[way](model) if way in makers else by_factors
    found = norms(x[:4], y[:4]).detach().double()
    pairs = [
        [
            timed(work, "cpu", at_least=0, clock=time.process_time)
            for work in (step, lambda: norms(x, y))
        ]
        for _ in range(times)
    ]
    return {
        "seconds": float(np.median([own["seconds"] for _, own in pairs])),
        "step-seconds": float(np.median([one["seconds"] for one, _ in pairs])),
        "steps": float(np.median([own["seconds"] / one["seconds"] for one, own in pairs])),
        "peak-mb": max(own["peak-mb"] for _, own in pairs),
        "step-peak-mb": max(one["peak-mb"] for one, _ in pairs),
        "relative-difference": float(((found - exact) / exact).abs().max()),
    }


def main() -> None:
    """Measure all, write, print the ratios."""
    parse_options(__doc__, child=child)
    rows = measured(__file__, [{"way": w, "batch": n, "times": k} for w, n, k in CASES])
    summary = {
        "training-steps": {f"{r['way']}, n={r['batch']}": round(r["steps"], 2) for r in rows},
        "peak-mb": {f"{r['way']}, n={r['batch']}": round(r["peak-mb"]) for r in rows},
    }
    write("gradient_norms", rows, summary)


if __name__ == "__main__":
    main()
