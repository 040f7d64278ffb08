"""The tangent kernel of n examples: factored, against contracting torch.func's Jacobians.

The reference does what PyTorch's tutorial on neural tangent kernels calls Jacobian contraction, in
its "trace" form, which is our kernel times C: per-example Jacobians by vmap over jacrev, contracted
layer by layer with einsum. It computes them once; the tutorial computes them for both sides.

    python benchmarks/kernel.py [--device cpu]

Each measurement runs in a process of its own: median seconds (Jacobian and kernel), the peak of
memory over that before it, and for few examples the difference from the reference in float64. Needs
only torch and numpy.
"""

from typing import Any

import torch
from common import make, matrix_rate, measured, parse_options, relative, timed, use_checkout, write
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

BOTH = {"mlp-100": (50, 100, 200, 400), "simple-cnn": (50, 100, 200), "resnet18-gn": (4, 8)}
ALONE = {"mlp-100": (1000, 2000, 5000, 10_000, 20_000), "simple-cnn": (1000, 2000)}
ALONE |= {"resnet18-gn": (32, 64)}


def contraction(model: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, parameters, (example.unsqueeze(0),)).squeeze(0)

    jacobians = vmap(jacrev(outputs), in_dims=(None, 0))(parameters, x)
    flat = [tensor.flatten(2) for tensor in jacobians.values()]
    total = sum(torch.einsum("naf,maf->nm", tensor, tensor) for tensor in flat)
    return total / flat[0].shape[1]


def child(network: str, method: str, n: int, device: str) -> dict[str, Any]:
    use_checkout()
    from fedntk.ntk import jacobian
    from fedntk.ntk.jacobian.blocks import workspace

    model, x = make(network, n, device)

    def factored(x: Tensor) -> Tensor:
        return jacobian(model, x, device=device).gram()

    work = factored if method == "factored" else lambda x: contraction(model, x)
    work(x[:2])  # loads what is loaded once
    found = timed(lambda: work(x), device)
    if method == "factored":
        found["kernel-mb"] = kernel = 4 * n**2 / 1e6
        found["jacobian-mb"] = jacobian(model, x[:2]).nbytes / 2 * n / 1e6
        if network == "mlp-100":
            room = workspace(x.device) / 1e6
            found["peak-over-kernel-and-block"] = found["peak-mb"] / (kernel + room)
            # of half of the symmetric kernel; the sum over outputs is taken in the factors
            operations = n**2 * (784 + 100 + 100 + 10)
            found["gflops"] = operations / found["seconds"] / 1e9
    if n <= 8 or (network == "mlp-100" and n == 50):
        kernel = work(x)
        found["relative-difference"] = relative(kernel, contraction(model.double(), x.double()))
    return found


def main() -> None:
    """Measure all, write, print the ratios."""
    device = parse_options(__doc__, child=child, device="cpu").device
    cases = [
        (net, n, m) for net, ns in BOTH.items() for n in ns for m in ("torch.func", "factored")
    ]
    cases += [(net, n, "factored") for net, ns in ALONE.items() for n in ns]
    rows = measured(
        __file__, [{"network": net, "method": m, "n": n, "device": device} for net, n, m in cases]
    )
    found = {(r["network"], r["n"], r["method"]): r for r in rows}
    pairs = {
        (net, n): (found[net, n, "torch.func"], found[net, n, "factored"])
        for net, n, _ in found
        if (net, n, "torch.func") in found and (net, n, "factored") in found
    }
    summary = {}
    for key, name in (("seconds", "times-faster"), ("peak-mb", "times-less-memory")):
        summary[name] = {
            f"{net} n={n}": round(slow[key] / fast[key], 1)
            for (net, n), (slow, fast) in pairs.items()
        }
    rate = matrix_rate(device)
    summary["share-of-matrix-rate"] = {
        f"{r['network']} n={r['n']}": round(r["gflops"] / rate, 2) for r in rows if "gflops" in r
    }
    write("kernel", rows, summary, device)


if __name__ == "__main__":
    main()
