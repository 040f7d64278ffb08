"""The solver against unit-step Euler and a fine reference, on Fashion-MNIST's own kernels.

Cross-entropy, MLP-100, eta = 0.01, 12 steps t up to 2,000, clients of about 200 examples from
Dirichlet(0.1), at the first weights and after three rounds. The reference is our solver in float64
at a tolerance of 1e-8; at n = 1,000 it is itself checked on the CPU against SciPy's DOP853 if SciPy
is installed. Errors are the largest over the 12 steps, relative, in the Euclidean norm.

    python benchmarks/solver.py --data-dir FOLDER [--device cpu]

Needs only torch and numpy.
"""

import time
from typing import Any

import torch
from common import RESULTS, STEPS, fashion_mnist, mlp, parse_options, use_checkout, write
from torch import Tensor

TOLERANCES = (1e-3, 3e-4, 2e-4, 1e-4, 3e-5, 1e-5)
ETA = 0.01


def problems(data_dir: str, device: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    from fedntk.ntk import evolve, jacobian, one_hot

    x, labels, sizes = fashion_mnist(data_dir, 80)
    ends = torch.tensor(sizes).cumsum(0)
    x = x.to(device)
    torch.manual_seed(0)
    model = mlp().eval()
    for layer in (model[1], model[3]):
        torch.nn.init.kaiming_normal_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    model.to(device)
    found = {}
    for done in range(4):  # rounds of 20 clients each
        start = 0 if done == 0 else int(ends[20 * done - 1])
        for clients in (5, 20):
            part = slice(start, int(ends[20 * done + clients - 1]))
            y = one_hot(labels[part], 10).to(device)
            jac, outputs = jacobian(model, x[part], device=device), model(x[part]).detach()
            if done in (0, 3):
                found[f"n={len(y)}, after {done} rounds"] = jac.gram(), outputs, y
        evolution = evolve(jac, outputs, y, loss="cross-entropy", learning_rate=ETA, steps=[1000])
        update = jac.vjp(evolution.residuals[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += update[name]
    return found


def euler(kernel: Tensor, f: Tensor, y: Tensor) -> Tensor:
    """Compute outputs at the steps by 2,000 unit steps, one kernel product each."""
    found = []
    for t in range(1, STEPS[-1] + 1):
        f = f + kernel @ (ETA / len(f) * (y - torch.softmax(f, 1)))
        if t in STEPS:
            found.append(f)
    return torch.stack(found)


def by_scipy(kernel: Tensor, f: Tensor, y: Tensor) -> Tensor | None:
    """Compute outputs at the steps by an explicit method of order 8, None without SciPy."""
    try:
        from scipy.integrate import solve_ivp
    except ModuleNotFoundError:
        return None
    h, target = kernel.double().cpu().numpy(), y.double().cpu()

    def slope(_: float, state: Any) -> Any:
        rate = ETA / len(f) * (target - torch.softmax(torch.from_numpy(state).view(f.shape), 1))
        return (h @ rate.numpy()).ravel()

    start = f.double().flatten().cpu().numpy()
    solved = solve_ivp(slope, (0, 2000), start, "DOP853", STEPS, rtol=1e-8, atol=1e-9)
    return torch.from_numpy(solved.y.T.copy()).view(-1, *f.shape)


def error(found: Tensor, reference: Tensor) -> float:
    return max(
        float((a.double().cpu() - b.cpu()).norm() / b.norm())
        for a, b in zip(found, reference, strict=True)
    )


def main() -> None:
    chosen = parse_options(__doc__, data_dir=True, device="cpu")
    device = chosen.device
    use_checkout()
    from fedntk.ntk import evolve

    rows, checks = [], {}
    for name, (kernel, f, y) in problems(chosen.data_dir, device).items():
        options = {"loss": "cross-entropy", "learning_rate": ETA, "steps": STEPS}
        exact = evolve(kernel.double(), f.double(), y.double(), tolerance=1e-8, **options).outputs
        other = by_scipy(kernel, f, y) if device == "cpu" and len(f) < 2000 else None
        if other is not None:
            checks[name] = error(other, exact)
        start = time.perf_counter()
        found = euler(kernel, f, y).cpu()
        seconds = time.perf_counter() - start
        rows.append({
            "problem": name, "method": "Euler, unit steps", "products": 2000, "steps": 2000,
            "error": error(found, exact), "seconds": seconds,
        })  # fmt: skip
        for tolerance in TOLERANCES:
            start = time.perf_counter()
            evolution = evolve(kernel, f, y, tolerance=tolerance, **options)
            evolved = evolution.outputs.cpu()
            seconds = time.perf_counter() - start
            rows.append({
                "problem": name, "method": "RKC", "tolerance": tolerance,
                "products": evolution.kernel_products, "steps": evolution.solver_steps,
                "error": error(evolved, exact), "error-estimate": evolution.error_estimate,
                "seconds": seconds,
            })  # fmt: skip
            print(rows[-1], flush=True)
    summary = {
        "reference-against-dop853": checks,
        "share-of-eulers-products": {
            f"{row['problem']}, tolerance {row['tolerance']:g}": row["products"] / 2000
            for row in rows
            if row["method"] == "RKC"
        },
    }
    write("solver", rows, summary, device)
    if device == "cpu":
        picture(rows)


def picture(rows: list[dict[str, Any]]) -> None:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        return
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    for name, colour in zip(dict.fromkeys(row["problem"] for row in rows), colours, strict=False):
        own = [row for row in rows if row["problem"] == name]
        ours = [row for row in own if row["method"] == "RKC"]
        axes.plot(
            [r["products"] for r in ours], [r["error"] for r in ours], "o-", c=colour, label=name
        )
        axes.plot(2000, own[0]["error"], "s", c=colour, mfc="none")
    axes.axhline(1e-3, c="0.5", lw=1, ls=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="kernel products to t = 2,000",
        ylabel="relative error of the outputs",
        title="RKC at tolerances 1e-3 ... 1e-5 (lines), Euler in unit steps (squares)",
    )
    axes.set_xticks([200, 300, 500, 1000, 2000], ["200", "300", "500", "1,000", "2,000"])
    axes.xaxis.minorticks_off()
    axes.title.set_fontsize(10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "solver.png", dpi=120)


if __name__ == "__main__":
    main()
