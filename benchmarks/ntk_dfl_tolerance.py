"""Tolerance of NTK-DFL's solver: what it costs in products, and its error.

Fashion-MNIST and the settings of the paper: the change of the weights at several tolerances, and
milliseconds of the clock, against a tolerance of 1e-7 in float64, for six clients at the first
weights and after eight evolutions of other clients. tables/ntk_dfl_tolerance.toml has accuracies.

    python benchmarks/ntk_dfl_tolerance.py --data-dir FOLDER

Needs fedntk installed.
"""

import time
from itertools import accumulate
from typing import Any

import torch
from common import fashion_mnist, measured, mlp, parse_options, write

CLASSES, TOLERANCES = 10, (1e-4, 1e-3, 1e-2)


def child(data_dir: str, clients: int = 6) -> dict[str, Any]:
    from fedntk.ntk import Jacobian, evolve, jacobian, one_hot

    x, labels, sizes = fashion_mnist(data_dir, 10 * clients)
    ends = [0, *accumulate(sizes)]
    torch.manual_seed(0)
    model = mlp().eval()
    for layer in (model[1], model[3]):
        torch.nn.init.kaiming_normal_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    flow = {"loss": "cross-entropy", "learning_rate": 0.01}

    def of(group: int) -> tuple[Jacobian, torch.Tensor, torch.Tensor]:
        part = slice(ends[group * clients], ends[(group + 1) * clients])
        outputs = model(x[part]).detach()
        return jacobian(model, x[part]), outputs, one_hot(labels[part], CLASSES)

    def compared(group: int) -> dict[str, dict[str, float]]:
        jac, f, y = of(group)
        kernel, doubles = jac.gram(), [a.double() for a in (f, y)]
        exact = evolve(kernel.double(), *doubles, steps=[800], tolerance=1e-7, **flow).residuals[0]
        found = {}
        for allowed in TOLERANCES:
            start = time.perf_counter()
            evolution = evolve(kernel, f, y, steps=[800], tolerance=allowed, **flow)
            seconds = time.perf_counter() - start
            off = jac.vjp((evolution.residuals[0].double() - exact).float())
            whole = jac.vjp(exact.float())
            norms = [sum(float(t.square().sum()) for t in u.values()) ** 0.5 for u in (off, whole)]
            products = evolution.kernel_products
            found[f"{allowed:g}"] = {
                "products": products,
                "error": norms[0] / norms[1],
                "milliseconds": round(1e3 * seconds, 1),
            }
        return found

    results = {f"first weights, {group}": compared(group) for group in (0, 1)}
    for group in range(8):
        jac, f, y = of(group)
        update = jac.vjp(evolve(jac.gram(), f, y, steps=[200], **flow).residuals[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += update[name]
    return {"results": results | {f"later weights, {group}": compared(group) for group in (8, 9)}}


def main() -> None:
    """Measure, write, print."""
    fixed = {"data_dir": parse_options(__doc__, child=child, data_dir=True).data_dir}
    (row,) = measured(__file__, [fixed])
    write("ntk_dfl_tolerance", summary={"tolerance": row["results"]})


if __name__ == "__main__":
    main()
