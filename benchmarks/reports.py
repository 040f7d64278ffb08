"""Cases of speed.py that report figures of their own, each from a process of its own."""

import contextlib
import hashlib
import json
import os
import re
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    CONF,
    RESULTS,
    ROOT,
    STEPS,
    fashion_mnist,
    in_child,
    mlp,
    parse_options,
    use_checkout,
)  # fmt: skip
from torch import Tensor

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A function that returns rows of one case."""

    group: str
    name: str
    rows: Callable[[Any], list[Row]]
    threads: int = 0
    cuda: bool = False
    data: bool = False
    timeout: float | None = None


# ------------------------------------------------------------------ solver

ETA = 0.01


def problems(data_dir: str, device: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Kernel, outputs and targets of 5 and 20 clients at the first weights and after 3 rounds."""
    from fedntk.ntk import evolve, jacobian, one_hot

    x, labels, sizes = fashion_mnist(data_dir, 80)
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    x = x.to(device)
    torch.manual_seed(0)
    model = mlp().eval()
    for layer in (model[1], model[3]):
        torch.nn.init.kaiming_normal_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    model.to(device)
    found = {}
    for done in range(4):  # rounds of 20 clients each
        for clients in (5, 20):
            part = slice(ends[20 * done], ends[20 * done + clients])
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


def by_scipy(kernel: Tensor, f: Tensor, y: Tensor) -> Tensor:
    """Compute outputs at the steps by an explicit method of order 8."""
    from scipy.integrate import solve_ivp

    h, target = kernel.double().cpu().numpy(), y.double().cpu()

    def slope(_: float, state: Any) -> Any:
        rate = ETA / len(f) * (target - torch.softmax(torch.from_numpy(state).view(f.shape), 1))
        return (h @ rate.numpy()).ravel()

    start = f.double().flatten().cpu().numpy()
    solved = solve_ivp(slope, (0, 2000), start, "DOP853", STEPS, rtol=1e-8, atol=1e-9)
    return torch.from_numpy(solved.y.T.copy()).view(-1, *f.shape)


def solver(chosen: Any) -> list[Row]:
    """Our solver beside unit-step Euler on kernels of Fashion-MNIST: 784-100-10, cross-entropy.

    eta = 0.01, 12 steps t up to 2,000. The reference is our solver in float64 at a tolerance of
    1e-8, and at n = 1,000 on the CPU it is itself compared with SciPy's DOP853. Errors are the
    largest over the steps, relative, in the Euclidean norm. `products` are those with the kernel.
    """
    use_checkout()
    from fedntk.ntk import evolve

    def error(outputs: Tensor, reference: Tensor) -> float:
        pairs = zip(outputs.double().cpu(), reference.cpu(), strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    rows: list[Row] = []
    for name, (kernel, f, y) in problems(chosen.data_dir, chosen.device).items():
        options = {"loss": "cross-entropy", "learning_rate": ETA, "steps": STEPS}
        exact = evolve(kernel.double(), f.double(), y.double(), tolerance=1e-8, **options).outputs
        if chosen.device == "cpu" and len(f) < 2000:
            difference = error(by_scipy(kernel, f, y), exact)
            rows.append({"case": name, "way": "DOP853 beside the reference", "error": difference})
        start = time.perf_counter()
        outputs = euler(kernel, f, y).cpu()
        row = {"case": name, "way": "Euler, unit steps", "seconds": time.perf_counter() - start}
        rows.append(row | {"error": error(outputs, exact), "products": 2000, "steps": 2000})
        for tolerance in (1e-3, 3e-4, 2e-4, 1e-4, 3e-5, 1e-5):
            start = time.perf_counter()
            evolution = evolve(kernel, f, y, tolerance=tolerance, **options)
            outputs = evolution.outputs.cpu()
            seconds = time.perf_counter() - start
            rows.append({
                "case": name, "way": f"RKC, tolerance {tolerance:g}", "seconds": seconds,
                "error": error(outputs, exact), "products": evolution.kernel_products,
                "steps": evolution.solver_steps, "error-estimate": evolution.error_estimate,
            })  # fmt: skip
    if chosen.device == "cpu":
        picture(rows)
    return rows


def picture(rows: list[Row]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    for name, colour in zip(dict.fromkeys(row["case"] for row in rows), colours, strict=True):
        of_case = [row for row in rows if row["case"] == name and "products" in row]
        (euler_row, *ours) = of_case
        axes.plot(
            [r["products"] for r in ours], [r["error"] for r in ours], "o-", c=colour, label=name
        )
        axes.plot(2000, euler_row["error"], "s", c=colour, mfc="none")
    axes.axhline(1e-3, c="0.5", lw=1, ls=":")
    axes.set(
        xscale="log", yscale="log", xlabel="kernel products to t = 2,000",
        ylabel="relative error of the outputs",
        title="RKC at tolerances 1e-3 ... 1e-5 (lines), Euler in unit steps (squares)",
    )  # fmt: skip
    axes.set_xticks([200, 300, 500, 1000, 2000], ["200", "300", "500", "1,000", "2,000"])
    axes.xaxis.minorticks_off()
    axes.title.set_fontsize(10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "solver.png", dpi=120)


# ------------------------------------------------------------------ secure sums

MOST = 2 * 10**9  # words with masks, of all clients, that are made for a comparison
Arrays = Mapping[str, np.ndarray]


def size(arrays: Any) -> int:
    """Return the bytes of arrays by name; 0 for anything else."""
    return sum(np.asarray(a).nbytes for a in arrays.values()) if isinstance(arrays, dict) else 0


def secure_sums(clients: int, numbers: int, chosen: Any) -> list[Row]:
    """Measure a secure average of weights, without Flower, by the stages of its protocol.

    A client's mean seconds and bytes in `public-key` (the roster goes to all), `shares` (of its
    secrets, among all others), `encode` (whole numbers of its weights), `masked`, `confirm` (who is
    in the sum) and `reveal` (its shares). The server's in `sum` and in `open`, which takes masks
    out when a tenth of the clients is lost after the shares. `compared=0`: three clients stand for
    all in `masked`; otherwise the sum must have the bits of the sum without masks.
    """
    from fedntk.clients.core.secure_sum import SecureSum
    from fedntk.ntk.payloads.masked_average import average_words
    from fedntk.trust import MaskedSum, ParcelKeys, Promise, Roster, new_key
    from fedntk.trust.secure_sum import exchange_of

    compared = clients**2 * numbers <= MOST
    ids, shown = np.arange(clients), clients if compared else 3
    rows: list[Row] = []

    def add(stage: str, seconds: float, down: int = 0, up: int = 0) -> None:
        row = {"case": f"{clients} clients, {numbers:,} numbers", "way": stage, "seconds": seconds}
        rows.append(row | {"down": down, "up": up, "compared": int(compared)})

    def timed(stage: str, calls: list[Callable[[], Any]], down: int = 0) -> list[Any]:
        start = time.perf_counter()
        found = [call() for call in calls]
        add(stage, (time.perf_counter() - start) / len(calls), down, size(found[0]))
        return found

    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(k) for k in ids]
        for home in homes:
            home.mkdir()
        parts = [SecureSum(home, ParcelKeys(new_key())) for home in homes]
        public = timed("public-key", [part.public_key for part in parts])
        roster = {
            "clients": ids, "threshold": np.array(-(-2 * clients // 3)),
            "keys": np.stack([p["public-key"] for p in public]),
            "nonces": np.stack([p["nonce"] for p in public]),
            "vouchers": np.zeros((clients, 0), np.uint8),
        }  # fmt: skip
        shared = timed("shares", [partial(p.shares, roster) for p in parts], size(roster))
        name = exchange_of(row.tobytes() for row in roster["nonces"])
        common = {"exchange": np.frombuffer(name, np.uint8), "clients": ids}
        parcels = [{**common, "parcels": np.stack([s["parcels"][k] for s in shared])} for k in ids]
        model = {"w": np.random.default_rng(0).standard_normal(numbers, np.float32)}

        def weights(client: int) -> Arrays:
            change = np.random.default_rng(client).standard_normal(numbers, np.float32)
            return {"w": model["w"] + 0.01 * change}

        changed = map(weights, range(3))
        timed("encode", [partial(average_words, model, w, 600, 0.5) for w in changed])
        arrived = ids[: clients - max(1, clients // 10)]
        total, plain = np.zeros((2, numbers + 4), np.uint64)
        seconds, masked = [], np.empty(0, np.uint64)
        for k in range(shown):
            words = average_words(model, weights(k), 600, 0.5)
            start = time.perf_counter()
            masked = parts[k].mask(parcels[k], words, b"")
            seconds.append(time.perf_counter() - start)
            if k in arrived:
                total += masked
                plain += words
        for k in range(shown, clients):  # they take part without their words
            parts[k].mask(parcels[k], words[:1], b"")
        add("masked", statistics.mean(seconds), size(model) + size(parcels[0]), masked.nbytes)
        start = time.perf_counter()
        for _ in range(3):
            total += masked
        add("sum", (time.perf_counter() - start) / 3 * len(arrived))
        total -= masked * np.uint64(3)
        message = {**common, "clients": arrived}
        calls = [partial(parts[k].confirm, message) for k in arrived]
        tags = timed("confirm", calls, size(message))
        sent = [{**message, "tags": np.stack([t["tags"][k] for t in tags])} for k in arrived]
        calls = [partial(parts[k].reveal, sent[k]) for k in arrived]
        shares = timed("reveal", calls, size(sent[0]))
        keys = tuple(key.tobytes() for key in roster["keys"])
        told = Roster(name, tuple(ids.tolist()), keys, int(roster["threshold"]))
        promises = {
            int(k): Promise(*(part.tobytes() for part in s["promise"]))
            for k, s in zip(ids, shared, strict=True)
        }
        revealed = {
            int(k): dict(zip(s["clients"].tolist(), map(bytes, s["shares"]), strict=True))
            for k, s in zip(arrived, shares, strict=True)
        }
        server = MaskedSum(told, promises)
        (opened,) = timed("open", [lambda: server.unmask(total, arrived.tolist(), revealed)])
        if compared and not np.array_equal(opened, plain):
            raise RuntimeError("the sum is not that of the numbers without masks")
    return rows


# ------------------------------------------------------------------ what a round costs

PATIENCE = 0.2  # s between two looks at processes


class Watch:
    """Measures the rounds of one run as they end, by families of processes."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.families: dict[str, Callable[[], list[Any]]] = {}
        self.found: dict[str, float] = defaultdict(float)
        self._seconds: list[float] = []
        self._ended = threading.Event()
        self._samples = threading.Thread(target=self._sample)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take note of a round that has ended."""
        number = record["round"]
        if number in (1, self.rounds + 1):
            sign = -1 if number == 1 else 1
            for name, family in self.families.items():
                spent = sum(each(family, lambda process: sum(process.cpu_times()[:4])))
                self.found[f"{name}cpu-seconds"] += sign * spent / self.rounds
        if 1 < number <= self.rounds + 1:
            self._seconds.append(record["seconds"])
        if number == self.rounds + 1:
            self._samples.start()
        if number == self.rounds + 2:
            self._ended.set()
            self._samples.join()

    def _sample(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(PATIENCE)
            for name, family in self.families.items():
                used = sum(each(family, lambda process: process.memory_full_info().pss)) / 1e6
                self.found[f"{name}memory-mb"] = max(self.found[f"{name}memory-mb"], used)

    def row(self) -> Row:
        """Return what was found."""
        seconds = self._seconds
        row = {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        return row | self.found


def each(family: Callable[[], list[Any]], figure: Callable[[Any], float]) -> Iterator[float]:
    import psutil

    for process in family():
        with contextlib.suppress(psutil.Error):
            yield figure(process)


def started_by(pid: int) -> list[Any]:
    import psutil

    return psutil.Process(pid).children(recursive=True)


def local(config: Any, watch: Watch) -> None:
    import psutil

    from fedntk.simulations import run

    watch.families[""] = lambda: [psutil.Process()]
    run(config, progress=False, on_round=watch)


def ray(config: Any, watch: Watch) -> None:
    from fedntk.simulations import run

    watch.families[""] = lambda: started_by(os.getpid())
    run(config, engine="ray", progress=False, on_round=watch)


def cluster(config: Any, watch: Watch) -> None:
    from ray.cluster_utils import Cluster

    half = {"num_cpus": (os.cpu_count() or 2) // 2}
    nodes = Cluster(initialize_head=True, head_node_args=half)
    try:
        nodes.add_node(**half)
        ray(config.replace(ray_address=nodes.address), watch)
    finally:
        nodes.shutdown()


def supernodes(config: Any, watch: Watch) -> None:
    import psutil

    from fedntk.simulations import Federation
    from fedntk.simulations.engine import processes
    from fedntk.simulations.engine.flwr_run import APP

    with Federation(config.folder / "federation", config.num_clients) as federation:
        server = federation.superlink.pid
        watch.families[""] = lambda: started_by(os.getpid())
        watch.families["server-"] = lambda: [psutil.Process(server), *started_by(server)]
        submission = federation.submit(APP, config.run_config())
        path = config.folder / "rounds.jsonl"
        for line in processes.follow(path, submission.process, federation.superlink):
            watch(json.loads(line))
        submission.wait()


WAYS = {way.__name__: way for way in (local, ray, cluster, supernodes)}


def round_cost(way: str, clients: int, rounds: int) -> Row:
    """Run two rounds more than are timed: workers start in the first; the last samples memory."""
    from fedntk.simulations import Config

    load, watch = os.getloadavg()[0], Watch(rounds)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            method="fedavg", dataset="digits", partition="iid", model="mlp", width=10,
            batch_size=2000, num_clients=clients, clients_per_round=clients,
            clients_per_evaluation=0, rounds=rounds + 2, out=folder,
        )  # fmt: skip
        WAYS[way](config, watch)
        learned = (config.folder / "model.safetensors").read_bytes()
    return {**watch.row(), "load-before": load, "model": hashlib.sha256(learned).hexdigest()}


def round_costs(clients: int, ways: tuple[str, ...], chosen: Any) -> list[Row]:
    """Measure what a round costs besides the clients' work, by what runs the clients.

    FedAvg of the simulations' app on digits, all clients in each round: a client reads its images,
    builds an MLP of 10 hidden units and takes one step with all of its images. `local`: the local
    engine; `ray`: Flower on Ray, a worker for each core; `cluster`: on two nodes with half of the
    cores each; `supernodes`: a SuperLink and a SuperNode for each client, with TLS and keys. All is
    on this machine. Ways must give the same bits. Seconds are those of the server's clock, median
    over rounds, least and most; CPU seconds are means over all processes but the one that watches;
    memory is the most that these use at a time, what they share counted once; `server-` is the
    SuperLink and its ServerApp.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, models = [], set()
    for way in ways:
        case = {"way": way, "clients": clients, "rounds": 3}
        if (row := in_child(__file__, case)) is not None:
            models.add(row.pop("model"))
            rows.append({"case": f"{clients:,} clients", **row})
    if len(models) > 1:
        raise RuntimeError("ways learned different bits")
    return rows


# ------------------------------------------------------------------ real federations

TARGET, CAP = 0.88, 300.0
COMMON = {
    "dataset": "fashion-mnist", "num-clients": 3, "clients-per-round": 3, "alpha": 0.5,
    "clients-per-evaluation": 0, "seed": 0,
}  # fmt: skip
EXCHANGE = {
    "method": "one-exchange", "model": "scattering", "random-features": 1000, "bandwidth": 1.6,
    "standardise": False, "rounds": 1,
}  # fmt: skip
METHODS: dict[str, Row] = {
    "one-exchange": EXCHANGE,
    "one-exchange-20000": EXCHANGE | {"random-features": 2000, "train-examples": 20_000},
    "fedavg": {"learning-rate": 0.1, "local-epochs": 50, "batch-size": 200, "rounds": 40},
    "scaffold": {"learning-rate": 0.3, "local-epochs": 10, "batch-size": 32, "rounds": 40},
    "ntk-fl": {"learning-rate": 0.01, "sampling-rate": 0.01, "rounds": 40},
}
MOMENTS = {"started": "Starting ", "answered": "Aggregated MetricRecord"}
EVALUATION = re.compile(r"Evaluation on the server: (?:None|\{'accuracy': ([0-9.]+))")


def federation_minutes(method: str, chosen: Any) -> list[Row]:
    """Measure seconds from ``flwr run`` to 88 % on Fashion-MNIST, in a real federation.

    One SuperLink with TLS and three SuperNodes that authenticate, on this machine; Dirichlet 0.5
    over three clients, the whole test set on the server after each round, rates of
    simulations/conf. A run is stopped at the target, or after 300 s: then it has no `seconds`.
    `started`: the ServerApp has loaded Flower, torch and data; `answered`: the first replies are
    aggregated; `evaluated`: the first model is. Other rows are processes: how long they lived
    (`seconds`), when they began and what CPU seconds they took in the run.
    """
    import psutil

    from fedntk.simulations import RunFailed
    from fedntk.simulations.deploy.federation import CONNECTION, Federation

    seen: dict[int, Row] = {}

    def look(now: float, begin: float) -> None:
        for process in started_by(os.getpid()):
            with contextlib.suppress(psutil.Error):
                cpu, pid = sum(process.cpu_times()[:2]), process.pid
                if pid not in seen:
                    names = [Path(word).name for word in process.cmdline()]
                    name = next((word for word in names if "fl" in word), process.name())
                    began = process.create_time() - begin
                    seen[pid] = {"way": f"{name} {pid}", "began": max(0.0, began)}
                    seen[pid]["before"] = cpu if began < -1 else 0.0
                seen[pid] |= {"seconds": now - seen[pid]["began"], "cpu-seconds": cpu}

    row: Row = {"case": method, "way": "run", "load": os.getloadavg()[0], "seconds": None}
    with (
        tempfile.TemporaryDirectory() as folder,
        Federation(folder, 3, environment={"OMP_NUM_THREADS": "1"}) as federation,
    ):
        settings = {"method": method, **COMMON, **METHODS[method], "out": f"{folder}/results"}
        settings["data-dir"] = str(Path(chosen.data_dir).absolute())
        start, begin = time.monotonic(), time.time()
        submission = federation.submit(ROOT / "simulations", settings)
        ended = False
        while not ended and row["seconds"] is None and (now := time.monotonic() - start) < CAP:
            ended = submission.process.poll() is not None  # and then its log is read once more
            for moment, sign in MOMENTS.items():
                if moment not in row and sign in submission.text:
                    row[moment] = now
            found = [float(text) for text in EVALUATION.findall(submission.text)[1:]]  # round 1 on
            if found:
                row.setdefault("evaluated", now)
                row |= {"accuracy": found[-1], "rounds": len(found), "until": now}
                row["seconds"] = now if found[-1] >= TARGET else None
            look(now, begin)
            time.sleep(PATIENCE)
        number = re.search(r"started run (\d+)", submission.text)
        if submission.process.poll() is None and number:
            with contextlib.suppress(RunFailed):  # it may end by itself just now
                federation.flwr("stop", number[1], CONNECTION)
        submission.process.wait()
        if "accuracy" not in row and ended:
            raise RuntimeError(submission.text[-2000:])
    for process in seen.values():
        process |= {"case": method, "cpu-seconds": process["cpu-seconds"] - process.pop("before")}
    return [row, *(process for process in seen.values() if process["cpu-seconds"] >= 0.1)]


STAGES = ("waiting", "flower", "imports", "answer", "back")
TIMES = ("sent", "started", "loaded", "imported", "answered", "received")


def deployment(chosen: Any) -> list[Row]:
    """Measure exchanges with three clients that do nothing, five times three of each kind.

    A federation on this machine, with TLS and SuperNodes that authenticate; 0.3 MB of weights go to
    each node and come back. Flower starts a process for each message to a node: `waiting` until it
    starts (the SuperNode asks for messages every 3 s, its SuperExec for tasks every second),
    `flower` until it reaches the app, `imports` of torch and fedntk.clients, `answer` of the
    client, `back` until the server has all replies, for which it asks every 3 s. Medians over
    replies; CPU seconds are those of the process.
    """
    from fedntk.simulations.deploy.federation import Federation

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        with Federation(Path(folder) / "federation", 3) as federation:
            options = {"nodes": 3, "repeats": 5, "out": str(out)}
            federation.run(ROOT / "benchmarks" / "deployment_app", options)
        replies = json.loads(out.read_text(encoding="utf-8"))
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reply in replies:
        at = [reply[f"{moment}-time"] for moment in TIMES]
        cpu = [0.0, *(reply[f"{moment}-cpu"] for moment in TIMES[2:5])]
        found = {"seconds": at[-1] - at[0]}
        found |= {f"seconds-{s}": b - a for s, a, b in zip(STAGES, at, at[1:], strict=False)}
        found |= {
            f"cpu-seconds-{s}": b - a for s, a, b in zip(STAGES[1:], cpu, cpu[1:], strict=False)
        }
        for kind in (reply["exchange"], "all"):
            for name, value in found.items():
                figures[kind][name].append(value)
    return [
        {"case": kind, "way": "exchange"}
        | {name: statistics.median(values) for name, values in of_kind.items()}
        | {"least": min(of_kind["seconds"]), "most": max(of_kind["seconds"])}
        for kind, of_kind in figures.items()
    ]


# ------------------------------------------------------------------ runs on a GPU

SHARED = {
    "model": "simple-cnn", "rounds": 5, "num-clients": 40, "train-examples": 20_000,
    "partition": "iid", "local-epochs": 5, "batch-size": 64,
}  # fmt: skip
TWO_STAGES = {"tct.bootstrap-rounds": 4, "rounds": 14}
RUNS: dict[str, tuple[str, Row]] = {
    "one exchange, Fashion-MNIST, 60,000 images, p = 2,000": (
        "one_exchange_fmnist", {"random-features": 2000},
    ),
    "one exchange, Fashion-MNIST, 60,000 images, p = 8,000": ("one_exchange_fmnist", {}),
    "NTK-FL, Fashion-MNIST, 100 clients of 200 examples a round": (
        "ntk_fl_fmnist", {"clients-per-round": 100, "rounds": 5},
    ),
    "TCT, Fashion-MNIST, 60,000 images, p = 100,000": ("tct_fmnist", TWO_STAGES),
    "TCT, CIFAR-10 (JPEG subset), ResNet-18, p = 100,000": (
        "tct_fmnist", {"model": "resnet18", "norm": "group", **TWO_STAGES},
    ),
}  # fmt: skip


def gpu_run(
    case: str, conf: str, settings: Row, devices: tuple[str, ...], chosen: Any
) -> list[Row]:
    """Measure a whole run with Flower on a GPU, `methods` beside the CPU, by the clock.

    `methods`: each file of simulations/conf for digits, five rounds. `engines`: FedAvg of SimpleCNN
    on Fashion-MNIST, clients one after the other in this process, and on Ray with a share of the
    GPU for each. `runs`: what takes a CPU long. `gpu-mb` is the peak in this process.
    """
    from fedntk.simulations import run

    rows = []
    for device in devices:
        engine = "ray" if "client-gpus" in settings else "local"
        options = {key.replace("-", "_"): value for key, value in settings.items()}
        if "digits" not in conf:
            options["data_dir"] = chosen.data_dir
        if "CIFAR" in case:
            options["dataset"] = f"hf:{chosen.data_dir}/CIFAR10-jpeg"
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            done = run(
                CONF / f"{conf}.toml", engine=engine, out=folder, progress=False, device=device,
                **options,
            )  # fmt: skip
            summary, headline = done.summary, done.config.chosen_method.headline
        rows.append({
            "case": case, "way": engine, "device": device, "seconds": time.perf_counter() - start,
            "rounds": done.config.rounds, "seconds-in-rounds": summary["seconds"],
            headline: float(done.curve(headline).iloc[-1]), "loss": summary.get("loss"),
            "gpu-mb": torch.cuda.max_memory_allocated() / 1e6 if device != "cpu" else 0,
        })  # fmt: skip
    return rows


def gpu_runs() -> Iterator[Report]:
    def report(case: str, conf: str, settings: Row, *devices: str) -> Report:
        rows = partial(gpu_run, case, conf, settings, devices)
        data = "digits" not in conf
        return Report("gpu_runs", case, rows, cuda=True, data=data, timeout=300)

    for file in sorted(CONF.glob("*_digits.toml")):
        name = file.stem.removesuffix("_digits").replace("_", "-")
        more = {"tct.bootstrap-rounds": 3} if name == "tct" else {}  # both stages in five rounds
        yield report(f"methods, {name}", file.stem, {"rounds": 5, **more}, "cpu", "cuda")
    for share in ("", 1, 0.25, 0.125):
        more = {"client-gpus": share} if share else {}
        words = "".join(f", client-gpus = {value:g}" for value in more.values())
        case = f"engines, FedAvg, SimpleCNN{words}"
        yield report(case, "fedavg_fmnist", {**SHARED, **more}, "cuda")
    for case, (conf, settings) in RUNS.items():
        yield report(f"runs, {case}", conf, settings, "cuda")


def reports() -> list[Report]:
    """Return all reports."""
    found = [Report("solver", "all", solver, cuda=True, data=True)]
    for clients in (10, 100):
        for numbers in (8000, 1_000_000, 11_000_000):
            rows = partial(secure_sums, clients, numbers)
            found.append(Report("secure_sums", f"{clients}x{numbers}", rows))
    for clients, ways in {
        **dict.fromkeys((10, 100, 1000), ("local", "ray", "cluster")),
        **dict.fromkeys((2, 5), ("local", "supernodes")),
    }.items():
        rows = partial(round_costs, clients, ways)
        found.append(Report("round_costs", f"{clients} clients", rows))
    for method in METHODS:
        rows = partial(federation_minutes, method)
        found.append(Report("federation_minutes", method, rows, threads=1, data=True))
    return [*found, Report("deployment", "exchanges", deployment, threads=1), *gpu_runs()]


if __name__ == "__main__":
    parse_options(__doc__, child=round_cost)
