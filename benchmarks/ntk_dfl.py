"""A round of NTK-DFL on the local engine: seconds, memory, bytes, and how they grow.

Fashion-MNIST, 784-100-10, 200 images a client from Dirichlet(0.1), cross-entropy, eta = 0.01,
t = 800, kappa random neighbours a client, all clients in every round, one torch thread in each
worker. Each case is a process of its own. What is measured is round 2, from the end of round 1 to
its own end, with records and checkpoints, and without evaluation. "seconds" are those of the clock,
which other work on the machine makes longer; "cpu-seconds" are those of the process. "peak-mb" is
the largest resident memory of the process, data set and libraries included.

"bytes-up" and "bytes-down" are metered, and means over the clients. The formulas are those of
docs/methods/ntk_dfl.md. "through no relay" is what a client would send if its weights travelled to
each neighbour. No Jacobian is sent dense; its bytes would be 4 n C P for each neighbour.

"tolerance": the change of the weights at several tolerances of the solver, and with a kernel in
bfloat16, and milliseconds of the clock, against a tolerance of 1e-7 in float64, for six clients at
the first weights and after eight evolutions of other clients.
"accuracy": that of the mean model, and the mean of the clients' models, on 5,000 validation
examples in rounds 1 to 8 of 40 clients, for two seeds.

    python benchmarks/ntk_dfl.py --data-dir FOLDER

FOLDER is in torchvision's layout. Writes results/ntk_dfl.csv and .json. Needs fedntk installed.
"""

import resource
import tempfile
import time
from itertools import accumulate
from typing import Any

import torch
from common import fashion_mnist, machine, measured, mlp, options, write

CLASSES, INPUTS, WIDTH = 10, 784, 100
P = INPUTS * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
CASES: tuple[dict[str, Any], ...] = (
    {"clients": 100, "kappa": 2},
    {"clients": 100, "kappa": 5},
    {"clients": 100, "kappa": 10},
    {"clients": 200, "kappa": 5},
    {"clients": 300, "kappa": 5},
    {"clients": 300, "kappa": 5, "workers": 2},
    {"clients": 100, "kappa": 5, "tolerance": 1e-4},
    {"clients": 100, "kappa": 5, "tolerance": 1e-2},
    {"clients": 300, "kappa": 5, "topology": "clustered"},
    {"clients": 300, "kappa": 5, "topology": "clustered", "evolve_once": True},
)


TOLERANCES = (1e-4, 1e-3, 1e-2)
SETTINGS = {
    "method": "ntk-dfl",
    "dataset": "fashion-mnist",
    "partition": "client-dirichlet",
    "alpha": 0.1,
    "clients_per_evaluation": 0,
    "model": "mlp",
    "width": WIDTH,
    "loss": "cross-entropy",
    "learning_rate": 0.01,
}


class Enough(Exception):  # noqa: N818 - no error
    """Ends the run."""


def child(part: str = "round", **own: Any) -> dict[str, Any]:
    """Measure one case."""
    return {"round": one_round, "tolerance": tolerance, "accuracy": accuracy}[part](**own)


def one_round(
    clients: int, kappa: int, data_dir: str, examples: int = 200, workers: int = 1, **own: Any
) -> dict[str, Any]:
    """Measure round 2."""
    from fedntk.simulations import Config, run

    found: dict[str, Any] = {}
    started: list[float] = []

    def on_round(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            found["seconds"] = time.perf_counter() - started[0]
            found["cpu-seconds"] = time.process_time() - started[1]
            for way in ("up", "down"):
                found[f"bytes-{way}"] = record[f"bytes-{way}"] / clients
            found["mean-examples"] = record["num-examples"] / clients
            raise Enough
        started[:] = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            **SETTINGS,
            data_dir=data_dir,
            examples_per_client=examples,
            num_clients=clients,
            clients_per_round=clients,
            rounds=3,
            evaluate_every=3,
            out=folder,
            ntk_dfl={"degree": kappa, **own},
        )
        try:
            run(config, workers=workers, progress=False, on_round=on_round)
        except Exception as error:
            if not isinstance(error.__cause__ or error, Enough):
                raise
    found["peak-mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return found | formulas(kappa, found["mean-examples"], once="evolve_once" in own)


def formulas(kappa: int, examples: float, *, once: bool) -> dict[str, float]:
    """Bytes of a client in a round; where hubs evolve, the mean over one and its members."""
    row = INPUTS + 2 * WIDTH + 2 * CLASSES  # inputs, slopes, activations, outputs, targets
    upload, weights = 4 * examples * row, 4 * P + 8
    if once:
        up = 3 * weights + kappa * (upload + weights)
        down = kappa * (upload + weights) + kappa * 2 * weights
        return {"formula-up": up / (kappa + 1), "formula-down": down / (kappa + 1)}
    return {
        "formula-up": 2 * weights + kappa * upload,
        "formula-down": 2 * kappa * weights + kappa * upload,
        "formula-up, through no relay": 2 * kappa * weights + kappa * upload,
        "formula-up, dense, through no relay": kappa * (2 * weights + 4 * examples * CLASSES * P),
    }


def tolerance(data_dir: str, clients: int = 6) -> dict[str, Any]:
    """Measure products of the kernel and the error of the weights' change, relative in its norm."""
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
        for allowed, dtype in (*((t, "outputs") for t in TOLERANCES), (1e-2, "bfloat16")):
            options = {**flow, "kernel_dtype": dtype}
            start = time.perf_counter()
            evolution = evolve(kernel, f, y, steps=[800], tolerance=allowed, **options)
            seconds = time.perf_counter() - start
            off = jac.vjp((evolution.residuals[0].double() - exact).float())
            whole = jac.vjp(exact.float())
            norms = [sum(float(t.square().sum()) for t in u.values()) ** 0.5 for u in (off, whole)]
            products = evolution.kernel_products
            name = f"{allowed:g}" + (", bfloat16" if dtype == "bfloat16" else "")
            found[name] = {
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


def accuracy(seed: int, tolerance: float, data_dir: str) -> dict[str, Any]:
    """Train 40 clients for eight rounds."""
    from fedntk.simulations import Config, run

    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            **SETTINGS,
            data_dir=data_dir,
            num_clients=40,
            clients_per_round=40,
            rounds=8,
            seed=seed,
            validation_examples=5000,
            evaluate_on="validation",
            out=folder,
            ntk_dfl={"tolerance": tolerance},
        )
        result = run(config, progress=False)
        return {
            name: [round(float(v), 4) for k, v in result.curve(metric).items() if k]
            for name, metric in CURVES.items()
        }


def main() -> None:
    """Measure all, write, print."""
    chosen = options(__doc__, child, data_dir=True)
    fixed = {"data_dir": chosen.data_dir}
    (by_tolerance,) = measured(__file__, [{"part": "tolerance", **fixed}])
    runs = [{"seed": seed, "tolerance": t} for seed in (0, 1) for t in TOLERANCES]
    accuracies = measured(__file__, [{"part": "accuracy", **own, **fixed} for own in runs])
    rows = measured(__file__, [{**case, **fixed} for case in CASES])
    for row in rows:
        del row["data_dir"]

    def values(key: str, digits: int) -> dict[str, float]:
        return {
            ", ".join(f"{k} {row[k]}" for k in CASE if k in row): round(row[key], digits)
            for row in rows
        }

    summary = {
        "machine": machine("cpu"),
        "seconds": values("seconds", 1),
        "cpu-seconds": values("cpu-seconds", 1),
        "peak-mb": values("peak-mb", 0),
        "bytes-up": values("bytes-up", 0),
        "tolerance": by_tolerance["results"],
        "accuracy": {
            f"tolerance {row['tolerance']:g}, seed {row['seed']}": {k: row[k] for k in CURVES}
            for row in accuracies
        },
    }
    write("ntk_dfl", rows, summary)


CURVES = {"mean model": "accuracy", "clients' models": "trained-accuracy-mean"}
CASE = ("clients", "kappa", "workers", "tolerance", "topology", "evolve_once")

if __name__ == "__main__":
    main()
