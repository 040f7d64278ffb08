"""A whole round of NTK-FL, in seconds and memory, and how it grows with the number of examples.

Jacobians of all clients one after the other, their wire format, the global Jacobian, the kernel,
the evolution to 12 candidates (cross-entropy, eta = 0.01, t up to 2,000), the candidates' weights,
and their losses on all clients' examples under the true network: all that strategy and clients
compute, without Flower's messages. MLP-100 on Fashion-MNIST, clients of about 200 examples from
Dirichlet(0.1). ``mean`` builds the n x n kernel, ``full`` couples all outputs and builds none,
``mean, unbuilt`` is the mean kernel past its memory budget.

    python benchmarks/ntk_fl_round.py --data-dir FOLDER [--device cpu]

Each round runs in a process of its own. Needs only torch and numpy.
"""

import time
from typing import Any

import torch
from common import STEPS, fashion_mnist, measured, mlp, parse_options, timed, use_checkout, write

CASES = [(c, "mean") for c in (5, 20, 50, 100)] + [(c, "full") for c in (5, 20, 50, 100)]
CASES += [(5, "mean, unbuilt")]
AUTHORS_SECONDS = 208  # the authors' program, 5 clients x 200 examples, on four CPU cores


def child(clients: int, kernel: str, device: str, data_dir: str) -> dict[str, Any]:
    use_checkout()
    from fedntk.ntk import Jacobian, JacobianUpload, jacobian, loss_value, one_hot
    from fedntk.ntk.evolution.candidates import Candidates
    from fedntk.ntk.evolution.gradient_flow import GradientFlow

    x, labels, sizes = fashion_mnist(data_dir, clients)
    torch.manual_seed(0)
    model = mlp().eval().to(device)
    weights = {name: w.cpu().numpy().copy() for name, w in model.state_dict().items()}
    shapes = {name: w.shape for name, w in weights.items()}
    pictures, targets = x.to(device).split(sizes), one_hot(labels, 10).split(sizes)
    parts: dict[str, float] = {}

    def upload(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        with torch.no_grad():
            outputs = model(x).cpu()
        return JacobianUpload(jacobian(model, x), outputs, y).to_arrays()

    def one_round() -> None:
        marks = [time.perf_counter()]

        def mark(name: str) -> None:
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            parts[name] = marks[-1] - marks[-2]

        sent = [upload(x, y) for x, y in zip(pictures, targets, strict=True)]
        mark("jacobians-s")
        known = {name: torch.from_numpy(w) for name, w in weights.items()}
        uploads = [
            JacobianUpload.from_arrays(arrays, parameters=shapes, weights=known) for arrays in sent
        ]
        whole = Jacobian.concatenate([u.jacobian for u in uploads]).to(device)
        outputs = torch.cat([u.outputs for u in uploads]).to(device)
        of_all = torch.cat([u.targets for u in uploads]).to(device)
        mark("stacking-s")
        flow = GradientFlow(
            loss="cross-entropy",
            learning_rate=0.01,
            steps=STEPS,
            kernel="full" if kernel == "full" else "mean",
            memory_budget=0 if kernel == "mean, unbuilt" else None,
        )
        candidates = Candidates.of(weights, whole, outputs, of_all, flow)
        parts["kernel-products"] = candidates.evolution.kernel_products
        mark("kernel-and-evolution-s")
        losses = []
        for row in range(len(STEPS)):
            own = candidates.weights_at(row)
            model.load_state_dict({k: torch.from_numpy(w) for k, w in own.items()})
            total = 0.0
            for x, y in zip(pictures, targets, strict=True):
                with torch.no_grad():
                    total += len(y) * loss_value(model(x).cpu(), y, "cross-entropy")
            losses.append(total / sum(sizes))
        model.load_state_dict({k: torch.from_numpy(w) for k, w in weights.items()})
        parts["best-loss"] = min(losses)
        mark("candidates-s")

    jacobian(model, pictures[0][:2])  # loads what is loaded once
    return {"n": sum(sizes), **timed(one_round, device, at_least=3.0), **parts}


def main() -> None:
    """Measure all, write, print."""
    chosen = parse_options(__doc__, child=child, data_dir=True, device="cpu")
    fixed = {"device": chosen.device, "data_dir": chosen.data_dir}
    rows = measured(__file__, [{"clients": c, "kernel": k, **fixed} for c, k in CASES])
    for row in rows:
        del row["data_dir"]
    at_1000 = next(r for r in rows if r["clients"] == 5 and r["kernel"] == "mean")
    summary = {
        "authors-program-seconds-at-n-1000": AUTHORS_SECONDS,
        "times-faster-than-it": round(AUTHORS_SECONDS / at_1000["seconds"]),
        "seconds": {f"{r['kernel']}, n={r['n']}": round(r["seconds"], 3) for r in rows},
        "peak-gb": {f"{r['kernel']}, n={r['n']}": round(r["peak-mb"] / 1e3, 2) for r in rows},
    }
    write("ntk_fl_round", rows, summary, chosen.device)


if __name__ == "__main__":
    main()
