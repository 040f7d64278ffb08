"""What a round costs besides the clients' work, by what runs the clients and by their number.

    python benchmarks/round_costs.py [--clients 10,100,1000] [--supernodes 2,5] [--rounds 5]

FedAvg of the simulations' app on digits, all clients in each round: a client reads its images,
builds an MLP of 10 hidden units and takes one step with all of its images, 1,437 over the number of
clients. There are four ways to run them:

local      the local engine, one client at a time
ray        Flower on Ray, with a worker for each core
cluster    the same on a Ray cluster of two nodes, which have half of the cores each
supernodes a SuperLink and a SuperNode for each client, with TLS and keys

All of it is on this machine: between machines the network comes on top, and each has processors of
its own. Each case runs in a process of its own, for two rounds more than are timed: in the first,
workers start; in the last, memory is sampled. Ways must give the same bits for the same clients.

seconds      of a round by the server's clock: median, least and most
cpu-seconds  of a round, the mean, over all processes but the one that only watches, which sees the
             end of a round up to 0.2 s late: short rounds need many
memory-mb    the most that these use at a time; what processes share counts once
server-...   those of the SuperLink and its ServerApp, which one machine has for all SuperNodes
"""

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
from common import measured, parse_options, write

from fedntk.simulations import Config, Federation, run
from fedntk.simulations.engine import processes
from fedntk.simulations.engine.flwr_run import APP

PATIENCE = 0.2  # s between two looks at memory
Family = Callable[[], list[psutil.Process]]


def started_by(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def cpu_seconds(family: Family) -> float:
    total = 0.0
    for process in family():
        with contextlib.suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def memory_mb(family: Family) -> float:
    total = 0
    for process in family():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6


class Watch:
    """Measures the rounds of one run as they end, by families of processes."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.families: dict[str, Family] = {}
        self.found: dict[str, float] = {}
        self._seconds: list[float] = []
        self._ended = threading.Event()
        self._samples = threading.Thread(target=self._sample)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take note of a round that has ended."""
        if record["round"] in (1, self.rounds + 1):
            sign = -1 if record["round"] == 1 else 1
            for name, family in self.families.items():
                key = f"{name}cpu-seconds"
                self.found[key] = self.found.get(key, 0.0) + sign * cpu_seconds(family)
        if 1 < record["round"] <= self.rounds + 1:
            self._seconds.append(record["seconds"])
        if record["round"] == self.rounds + 1:
            self._samples.start()
        if record["round"] == self.rounds + 2:
            self._ended.set()
            self._samples.join()

    def _sample(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(PATIENCE)
            for name, family in self.families.items():
                key = f"{name}memory-mb"
                self.found[key] = max(self.found.get(key, 0.0), memory_mb(family))

    def row(self) -> dict[str, float]:
        """Return what was found."""
        own = self._seconds
        seconds = {"seconds": statistics.median(own), "least": min(own), "most": max(own)}
        cpu = {k: v / self.rounds for k, v in self.found.items() if k.endswith("cpu-seconds")}
        return seconds | self.found | cpu


def local(config: Config, watch: Watch) -> None:
    watch.families[""] = lambda: [psutil.Process()]
    run(config, progress=False, on_round=watch)


def ray(config: Config, watch: Watch) -> None:
    watch.families[""] = lambda: started_by(os.getpid())
    run(config, engine="ray", progress=False, on_round=watch)


def cluster(config: Config, watch: Watch) -> None:
    from ray.cluster_utils import Cluster

    half = {"num_cpus": (os.cpu_count() or 2) // 2}
    nodes = Cluster(initialize_head=True, head_node_args=half)
    try:
        nodes.add_node(**half)
        ray(config.replace(ray_address=nodes.address), watch)
    finally:
        nodes.shutdown()


def supernodes(config: Config, watch: Watch) -> None:
    with Federation(config.folder / "federation", config.num_clients) as federation:
        server = federation.superlink.pid
        watch.families |= {
            "": lambda: started_by(os.getpid()),
            "server-": lambda: [psutil.Process(server), *started_by(server)],
        }
        submission = federation.submit(APP, config.run_config())
        path = config.folder / "rounds.jsonl"
        for line in processes.follow(path, submission.process, federation.superlink):
            watch(json.loads(line))
        submission.wait()


WAYS = {way.__name__: way for way in (local, ray, cluster, supernodes)}


def child(way: str, clients: int, rounds: int) -> dict[str, Any]:
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


def main() -> None:
    options = parse_options(
        __doc__, child=child, clients=(10, 100, 1000), supernodes=(2, 5), rounds=5
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    simulated, deployed = options.clients, options.supernodes
    cases = [(way, clients) for clients in simulated for way in ("local", "ray", "cluster")]
    cases += [("local", clients) for clients in deployed if clients not in simulated]
    cases += [("supernodes", clients) for clients in deployed]
    rows = measured(
        __file__,
        [{"way": way, "clients": clients, "rounds": options.rounds} for way, clients in cases],
    )
    models: dict[int, set[str]] = {}
    for row in rows:
        models.setdefault(row["clients"], set()).add(row.pop("model"))
    differing = [clients for clients, found in models.items() if len(found) > 1]
    if differing:
        raise RuntimeError(f"ways learned different bits with so many clients: {differing}")
    summary = {
        "load-after": round(os.getloadavg()[0], 2),
        "seconds-in-all": round(time.perf_counter() - began),
        "same-bits": True,
    }
    write("round_costs", rows, summary)


if __name__ == "__main__":
    main()
