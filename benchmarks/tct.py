"""Speed and memory of TCT: features, a whole stage 2, and a large client.

features  ``FeatureMap.extractor`` against algorithm 3's backward pass for each example; and one
          backward pass for the sum over a batch, which gives no example's features.
stage-2   Five clients of 500 images, two classes each, moments and 100 rounds, in-process.
memory    One client of 6,000 examples in a process of its own: statistics, then two rounds.

    python benchmarks/tct.py --data-dir FOLDER [--part features,stage-2,memory]

FOLDER is in torchvision's layout, with MNIST and Fashion-MNIST. simple_cnn at weights from one
seed, p = 100,000 tangent features, eta = 5e-5. Each part runs in a process of its own, on all
cores; ratios are of medians within one process. Writes
results/tct.csv and .json; parts that are not named keep their figures.
"""

import argparse
import copy
import csv
import gzip
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, in_child, machine, relative, write
from torch import Tensor, nn

ETA, STEPS = 5e-5, 500
Records = dict[str, dict[str, Any]]  # name -> name -> array
P = 100_000
CASES: dict[str, list[dict[str, Any]]] = {
    "features": [
        {"network": "simple-cnn", "n": 256, "times": 7},
        {"network": "simple-cnn", "n": 2000, "times": 3},
        {"network": "resnet18", "n": 32, "times": 3},
    ],
    "stage-2": [{"clients": 5, "n": 500, "rounds": 100}],
    "memory": [
        {"n": 6000, "dtype": "float32"},
        {"n": 6000, "dtype": "float16"},
        {"n": 1000, "dtype": "float32"},
    ],
}


def examples(data_dir: str | None, name: str, n: int, labels: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the first n pictures of the classes and their labels; random ones without folder."""
    if data_dir is None:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(n, 1, 28, 28, generator=generator)
        return x, torch.tensor(labels)[torch.arange(n) % len(labels)]
    folder = Path(data_dir) / name / "raw"
    files = [next(folder.glob(f"train-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1")]
    x, y = (
        np.frombuffer(
            gzip.decompress(f.read_bytes()) if f.suffix == ".gz" else f.read_bytes(), np.uint8
        )
        for f in files
    )
    chosen = np.nonzero(np.isin(y[8:], labels))[0][:n]
    pictures = x[16:].reshape(-1, 1, 28, 28)[chosen].astype(np.float32) / 255
    return (torch.from_numpy(pictures) - 0.286) / 0.353, torch.from_numpy(y[8:][chosen].astype(int))


def network(name: str = "simple-cnn") -> nn.Module:
    """Make a network of the simulations, its weights from one seed."""
    from fedntk.simulations.models import resnet18, simple_cnn

    torch.manual_seed(0)
    return resnet18((3, 32, 32), 10) if name == "resnet18" else simple_cnn((1, 28, 28), 10)


def medians(times: int, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, taking turns, so that they meet the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(times):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


class Client:
    """A client of stage 2 without a server: what it is sent, and the seconds that it takes."""

    def __init__(self, x: Tensor, y: Tensor, num_features: int, **options: Any) -> None:
        from fedntk.clients import TCTClient, get_weights
        from fedntk.ntk import FeatureMap
        from fedntk.ntk.payloads.convex_task import ConvexTask

        self.map = FeatureMap(num_features=num_features)
        self.model = network()
        weights = get_weights(self.model)
        self.network = {"network": dict(zip(self.model.state_dict(), weights, strict=True))}
        self.make = lambda: TCTClient(self.model, x, y, **options)
        self.key = ConvexTask.key_of(self.map, weights)

    def ask(
        self, step: str, records: Records, server_round: int = 1, **task: Any
    ) -> tuple[list[Any], float]:
        """Have it do a task; return its arrays and the seconds."""
        from fedntk.clients import NamedArrays
        from fedntk.ntk.payloads.convex_task import ConvexTask

        options = {"num_features": self.map.num_features, "learning_rate": ETA, "bias": False}
        asked = ConvexTask(step=step, network_key=self.key, **options, **task)
        client = self.make()
        start = time.perf_counter()
        config = asked.to_config() | {"server-round": server_round}
        sent, _, metrics = client.fit(NamedArrays(records), config)
        seconds = time.perf_counter() - start
        if not sent:
            raise RuntimeError(f"the client lacks what it was sent, or diverges: {metrics}")
        return sent, seconds


def sent_with(linear: Any, normaliser: Any = None) -> Records:
    """Return the records of a linear model, and of a normaliser."""
    records = {"linear": {"tct.linear": linear}}
    if normaliser is not None:
        records["normaliser"] = {"tct.mean": normaliser.mean, "tct.scale": normaliser.inv_std}
    return records


def features(
    network: str, n: int, times: int, num_features: int, data_dir: str | None
) -> list[dict[str, Any]]:
    """Time the extractor, algorithm 3's loop and the floor."""
    from fedntk.ntk import FeatureMap

    model = globals()["network"](network)
    if network == "simple-cnn":
        x, _ = examples(data_dir, "FashionMNIST", n, tuple(range(10)))
    else:
        x = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    chosen = FeatureMap(num_features=num_features)
    convexified = chosen.convexify(model).eval()
    parameters = list(convexified.parameters())
    total = sum(p.numel() for p in parameters)
    generator = torch.Generator().manual_seed(chosen.seed)
    coordinates = torch.randperm(total, generator=generator)[:num_features].sort().values
    looped = x[:256]

    def loop(model: nn.Module = convexified, x: Tensor = looped) -> Tensor:
        z = torch.empty(len(x), num_features, dtype=x.dtype)
        for i, example in enumerate(x):
            model.zero_grad()
            model(example[None])[0, 0].backward()
            z[i] = torch.cat([p.grad.flatten() for p in model.parameters()])[coordinates]
        return z

    def floor() -> None:
        for part in x.split(64):
            torch.autograd.grad(convexified(part).sum(), parameters)

    start = time.perf_counter()
    extract = chosen.extractor(model)
    extract(x[:1])
    ready = time.perf_counter() - start
    works = {"extractor": lambda: extract(x), "loop": loop, "floor": floor}
    exact = loop(copy.deepcopy(convexified).double(), looped.double())
    loop()
    floor()
    seconds = medians(times, works)
    rows = [
        {
            "network": network,
            "n": n,
            "method": name,
            "seconds": s,
            "ms-an-example": 1e3 * s / (len(looped) if name == "loop" else n),
        }
        for name, s in seconds.items()
    ]
    rows[0] |= {"once-s": ready, "relative-difference": relative(extract(looped), exact)}
    return rows


def stage_2(
    clients: int, n: int, rounds: int, num_features: int, data_dir: str | None
) -> list[dict[str, Any]]:
    """Run moments and rounds on the in-process engine."""
    from flwr.app import ArrayRecord, Context

    from fedntk.clients import TCTClient, client_app
    from fedntk.simulations.engine.engines import LocalGrid, MeteredGrid, meter
    from fedntk.strategies import TCT

    data = [examples(data_dir, "MNIST", n, (2 * k, 2 * k + 1)) for k in range(clients)]
    with tempfile.TemporaryDirectory() as cache:

        def client_fn(context: Context) -> TCTClient:
            k = int(context.node_config["partition-id"])
            return TCTClient(network(), *data[k], cache=cache, seed=(0, k))

        grid = MeteredGrid(LocalGrid(client_app(client_fn, mods=[meter]), clients, {}))
        model = network()
        strategy = TCT(
            network=model,
            bootstrap=None,
            num_features=num_features,
            learning_rate=ETA,
            local_steps=STEPS,
            min_available_nodes=clients,
            min_train_nodes=clients,
            fraction_evaluate=0.0,
        )
        costs: list[dict[str, float]] = []
        marks: list[float] = []

        def note(server_round: int, arrays: Any) -> None:
            costs.append(grid.take())
            marks.append(time.perf_counter())

        result = strategy.start(
            grid, ArrayRecord(model.state_dict()), num_rounds=1 + rounds, evaluate_fn=note
        )
        disk = sum(f.stat().st_size for f in Path(cache).rglob("*") if f.is_file())
        predictor = strategy.predictor(result.arrays)
    seconds = np.diff(marks)  # evaluate_fn is called once before the first round
    hits = sum(int((predictor.predict(x[:100]).argmax(1) == y[:100]).sum()) for x, y in data)
    return [
        {
            "clients": clients,
            "n": n,
            "rounds": rounds,
            "seconds": marks[-1] - marks[0],
            "moments-s": seconds[0],
            "first-round-s": seconds[1],
            "later-rounds-s": float(np.median(seconds[2:])),
            "later-rounds-clients-s": float(np.median([c["seconds-clients"] for c in costs[3:]])),
            "mb-down": sum(c["bytes-down"] for c in costs) / 1e6,
            "mb-up": sum(c["bytes-up"] for c in costs) / 1e6,
            "mb-down-a-later-round": costs[-1]["bytes-down"] / 1e6,
            "mb-up-a-later-round": costs[-1]["bytes-up"] / 1e6,
            "gb-on-disk": disk / 1e9,
            "peak-gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            "train-accuracy": hits / (100 * clients),
        }
    ]


def memory(n: int, dtype: str, num_features: int, data_dir: str | None) -> list[dict[str, Any]]:
    """Have one client take the statistics and two rounds; its memory is this process's."""
    from fedntk.ntk import Moments, Normaliser

    x, y = examples(data_dir, "FashionMNIST", n, (0,))
    anonymous, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            anonymous[0] = max(anonymous[0], _resident("RssAnon"))

    with tempfile.TemporaryDirectory() as cache:
        client = Client(x, y, num_features, cache=cache, dtype=dtype)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            sent, statistics_s = client.ask("moments", client.network)
            normaliser = Normaliser.of(Moments(n, *sent))
            start = np.zeros((num_features, 10), np.float32)
            (theta,), first_s = client.ask("linear", sent_with(start, normaliser), 2)
            task = {"state_round": 2, "control": "last"}
            _, second_s = client.ask("linear", sent_with(theta), 3, **task)
        finally:
            done.set()
            thread.join()
        disk = sum(f.stat().st_size for f in Path(cache).rglob("*") if f.is_file())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [
        {
            "n": n,
            "dtype": dtype,
            "seconds": statistics_s + first_s + second_s,
            "statistics-s": statistics_s,
            "first-round-s": first_s,
            "later-round-s": second_s,
            "gb-on-disk": disk / 1e9,
            "peak-gb": peak / 1e6,
            "peak-anonymous-gb": anonymous[0] / 1e9,
            "before-gb": before / 1e6,
        }
    ]


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not report {key}")


PARTS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "features": features,
    "stage-2": stage_2,
    "memory": memory,
}


def child(part: str, threads: int = 1, **options: Any) -> dict[str, Any]:
    """Measure one case; ``seconds`` is that of its first row."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    rows = PARTS[part](**{"num_features": P, "data_dir": None} | options)
    for row in rows:
        row |= {"threads": threads, "load-before": load}
    return {"seconds": rows[0]["seconds"], "rows": rows}


def summary_of(part: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pick the ratios and the figures that have a target."""
    if part == "features":
        each = {(r["network"], r["n"], r["method"]): r for r in rows}
        return {
            f"{name}, n={n}": {
                "ms-an-example": {
                    method: each[name, n, method]["ms-an-example"]
                    for method in ("extractor", "loop", "floor")
                },
                "times-faster-than-the-loop": each[name, n, "loop"]["ms-an-example"]
                / each[name, n, "extractor"]["ms-an-example"],
                "times-that-the-floor-is": each[name, n, "loop"]["ms-an-example"]
                / each[name, n, "floor"]["ms-an-example"],
            }
            for name, n in dict.fromkeys((r["network"], r["n"]) for r in rows)
        }
    if part == "stage-2":
        (row,) = rows
        return {k: v for k, v in row.items() if isinstance(v, float | int)}
    return {
        f"n={r['n']}, {r['dtype']}": {
            k: r[k] for k in ("peak-gb", "peak-anonymous-gb", "gb-on-disk", "seconds")
        }
        for r in rows
    }


def rounded(value: Any) -> Any:
    """Three digits for a report."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    """Measure the parts, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", help="in torchvision's layout")
    parser.add_argument("--part", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="all cores by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(child(**json.loads(chosen.child))))
        sys.exit()
    names = chosen.part.split(",")
    if not chosen.data_dir or not set(names) <= set(PARTS):
        parser.error(f"--data-dir is needed, and --part of {', '.join(PARTS)}")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    if (RESULTS / "tct.json").exists():
        summary = json.loads((RESULTS / "tct.json").read_text(encoding="utf-8"))
        with (RESULTS / "tct.csv").open(encoding="utf-8", newline="") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    torch.set_num_threads(chosen.threads)
    summary["machine"] = machine("cpu")
    for part in names:
        own = []
        for case in CASES[part]:
            fixed = {"data_dir": chosen.data_dir, "threads": chosen.threads}
            found = in_child(__file__, {"part": part, **fixed, **case})
            if found is None:
                raise SystemExit(f"{part} could not be measured")
            own += [{"part": part, **row} for row in found["rows"]]
            print(*found["rows"], sep="\n", flush=True)
        rows = [row for row in rows if row["part"] != part] + own
        summary[part] = rounded(summary_of(part, own))
    rows.sort(key=lambda row: list(PARTS).index(row["part"]))
    write("tct", rows, {key: summary[key] for key in ("machine", *PARTS) if key in summary})


if __name__ == "__main__":
    main()
