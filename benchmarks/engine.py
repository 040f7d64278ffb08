"""Rounds of FedAvg beside a bare torch loop over the same batches and beside other frameworks.

    python benchmarks/engine.py --data-dir DATA [--repeats 11] [--networks mlp-100,simple-cnn]
        [--workers 1,2] [--peers PYTHON] [--pfllib FOLDER] [--start-up 3] [--before PYTHON]

Fashion-MNIST, 100 clients x 600 images, 10 clients a round, one epoch in batches of 10, one torch
thread in each worker, no evaluation. Each contender is a process of its own. They take
turns round by round, so that other work on the machine slows all of them alike.
What is compared are medians over the rounds, and medians of the ratios of neighbouring rounds. On a
busy machine, seconds of the CPU ("cpu") tell more than those of the clock; Ray's are not counted.

"bare" is a loop over clients and batches with torch's SGD, and the mean of the weights. "fedntk" is
``fedntk.simulations.run`` on the local engine with its records and checkpoints ("seconds"), and the
same without these ("in-round"). "flower-ray" is benchmarks/stock_app, only Flower. BlazeFL is
installed into an environment of its own in build/peers, for which `--peers` names a Python that it
takes; one worker is its trainer of one client after another, more are its threads. PFLlib is run
from a checkout of it, if `--pfllib` names one, with as many torch threads as there are workers, as
it trains one client after another. A peer that cannot be installed is named and left out.

"start-up": seconds until the first round begins and until it has ended, in turns: of ``fedntk run
--engine ray``, of stock_app by ``flwr run`` on a SuperLink that is started for it, and of another
version of fedntk, which the environment of the Python `--before` has.

Writes results/engine.csv and .json. Needs fedntk installed.
"""

import argparse
import contextlib
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NETWORKS, ROOT, machine, write
from torch import Tensor, nn

CLIENTS, PER_ROUND, BATCH, RATE = 100, 10, 10, 0.05
MODELS = {"mlp-100": "mlp", "simple-cnn": "simple-cnn"}  # names of the simulations
STOCK = Path(__file__).parent / "stock_app"
Rows = list[dict[str, Any]]


# ------------------------------------------------------------------ contenders, a process each


def turn(**more: float) -> None:
    """Say how long the round took, and wait until the next one is wanted."""
    if hasattr(turn, "start"):
        more["seconds"] = time.perf_counter() - turn.start
        more["cpu-seconds"] = time.process_time() - turn.cpu_start
    _out.write(json.dumps(more) + "\n")
    _out.flush()
    if not sys.stdin.readline():
        os._exit(0)
    turn.start, turn.cpu_start = time.perf_counter(), time.process_time()


def examples(folder: str) -> tuple[Tensor, Tensor, np.ndarray]:
    """All images, labels, and which of them each client has."""
    x, y = (torch.from_numpy(np.load(Path(folder) / f"{name}.npy")) for name in "xy")
    return x, y, np.load(Path(folder) / "clients.npy")


def bare(case: Mapping[str, Any]) -> None:
    """Clients one after another, batches by index, torch's SGD, mean of the weights."""
    x, y, clients = examples(case["examples"])
    torch.manual_seed(0)
    model = NETWORKS[case["network"]][0]()
    generator, drawn = torch.Generator().manual_seed(0), np.random.default_rng(0)
    shards = [(x[own], y[own]) for own in clients]
    weights = copy.deepcopy(model.state_dict())
    while True:
        turn()
        sums = {name: torch.zeros_like(w) for name, w in weights.items()}
        for k in drawn.choice(CLIENTS, PER_ROUND, replace=False):
            model.load_state_dict(weights)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            own_x, own_y = shards[k]
            for batch in torch.randperm(len(own_x), generator=generator).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(own_x[batch]), own_y[batch]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                sums[name] += tensor / PER_ROUND
        weights = sums


def fedntk(case: Mapping[str, Any]) -> None:
    """Run the app's FedAvg on the local engine."""
    from fedntk.simulations import run

    def on_round(record: Mapping[str, Any]) -> None:
        turn(**{"in-round": record["seconds"]})

    with tempfile.TemporaryDirectory() as out:
        run(ours(case, out), workers=case["workers"], progress=False, on_round=on_round)


def ours(case: Mapping[str, Any], out: str) -> Any:
    """Return the configuration of fedntk; one test example, as no test is to be timed."""
    from fedntk.simulations import Config

    return Config(
        method="fedavg",
        dataset="fashion-mnist",
        data_dir=case["data-dir"],
        partition="iid",
        num_clients=CLIENTS,
        clients_per_round=PER_ROUND,
        clients_per_evaluation=0,
        test_examples=1,
        model=MODELS[case["network"]],
        batch_size=BATCH,
        learning_rate=RATE,
        rounds=case["rounds"],
        device="cpu",
        out=out,
    )


def flower_ray(case: Mapping[str, Any]) -> None:
    """Flower's own simulation of stock_app."""
    os.environ |= {"STOCK_APP": json.dumps(stock_options(case)), "PYTHONPATH": str(STOCK)}
    sys.path.insert(0, str(STOCK))
    import stock
    from flwr.simulation import run_simulation

    stock.after_round.append(lambda _: turn())
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        stock.server,
        stock.client,
        num_supernodes=CLIENTS,
        backend_config={"init_args": {"num_cpus": case["workers"]}, "client_resources": resources},
    )


def stock_options(case: Mapping[str, Any], out: str = "") -> dict[str, Any]:
    """Return the run-config of stock_app."""
    return {
        "network": case["network"],
        "examples": case["examples"],
        "batch-size": BATCH,
        "learning-rate": RATE,
        "num-clients": CLIENTS,
        "clients-per-round": PER_ROUND,
        "rounds": case["rounds"],
        "out": out,
    }


def blazefl(case: Mapping[str, Any]) -> None:
    """BlazeFL's FedAvg: one client after another, or in threads."""
    from blazefl.contrib import fedavg
    from torch.utils.data import DataLoader, TensorDataset

    x, y, clients = examples(case["examples"])
    shards = [TensorDataset(x[own], y[own]) for own in clients]

    class Dataset:
        def get_dataset(self, type_: Any, cid: int) -> Any:
            return shards[cid]

        def get_dataloader(
            self, type_: Any, cid: int, batch_size: int, generator: torch.Generator
        ) -> Any:
            return DataLoader(shards[cid], batch_size, shuffle=True, generator=generator)

    class Selector:
        def select_model(self, name: str) -> nn.Module:
            return NETWORKS[name][0]()

    common = {
        "model_selector": Selector(),
        "model_name": case["network"],
        "dataset": Dataset(),
        "num_clients": CLIENTS,
        "device": "cpu",
        "batch_size": BATCH,
        "seed": 0,
    }
    handler = fedavg.FedAvgBaseServerHandler(
        global_round=case["rounds"], sample_ratio=PER_ROUND / CLIENTS, **common
    )
    common |= {"epochs": 1, "lr": RATE}
    if case["workers"] == 1:
        trainer = fedavg.FedAvgBaseClientTrainer(**common)
    else:
        trainer = fedavg.FedAvgThreadPoolClientTrainer(num_parallels=case["workers"], **common)
    while True:
        turn()
        sampled = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), sampled)
        for package in trainer.uplink_package():
            handler.load(package)


def pfllib(case: Mapping[str, Any]) -> None:
    """PFLlib's FedAvg, its own evaluation left out."""
    torch.set_num_threads(case["workers"])
    system = Path(case["pfllib"]).resolve() / "system"
    x, y, clients = examples(case["examples"])
    for k, own in enumerate(clients):  # as its own programs for data sets write them
        for part in ("train", "test"):
            folder = system.parent / "dataset" / "engine" / part
            folder.mkdir(parents=True, exist_ok=True)
            data = {"x": x[own].numpy(), "y": y[own].numpy()}
            np.savez_compressed(folder / f"{k}.npz", data=data)
    os.chdir(system)
    sys.path.insert(0, str(system))
    from flcore.servers.serveravg import FedAvg

    torch.manual_seed(0)
    settings = {
        "model": NETWORKS[case["network"]][0](),
        "device": "cpu",
        "dataset": "engine",
        "num_classes": 10,
        "global_rounds": case["rounds"],
        "local_epochs": 1,
        "batch_size": BATCH,
        "local_learning_rate": RATE,
        "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0,
        "num_clients": CLIENTS,
        "join_ratio": PER_ROUND / CLIENTS,
        "random_join_ratio": False,
        "algorithm": "FedAvg",
        "time_threthold": 10000,
        "client_drop_rate": 0.0,
        "train_slow_rate": 0.0,
        "send_slow_rate": 0.0,
        "save_folder_name": "items",
    }
    settings |= dict.fromkeys(
        (
            *("few_shot", "time_select", "goal", "top_cnt", "auto_break", "eval_gap", "dlg_gap"),
            *("dlg_eval", "batch_num_per_client", "num_new_clients", "fine_tuning_epoch_new"),
        ),
        0,
    )
    with contextlib.redirect_stdout(sys.stderr):
        server = FedAvg(argparse.Namespace(**settings), 0)
    while True:
        turn()
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()


CONTENDERS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "bare": bare,
    "fedntk": fedntk,
    "blazefl": blazefl,
    "pfllib": pfllib,
    "flower-ray": flower_ray,
}


# ------------------------------------------------------------------ who takes turns with whom


class Contender:
    """A process that runs a round on request."""

    def __init__(self, name: str, python: str, case: Mapping[str, Any], scratch: Path) -> None:
        self.name = name
        self._log = scratch / f"{name}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
        if name == "pfllib":
            environment["OMP_NUM_THREADS"] = str(case["workers"])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this very program
                [python, __file__, "--child", json.dumps({"contender": name, **case})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        self._answer()  # ready

    def round(self) -> dict[str, float]:
        """Have it run a round; return what it took."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"{self.name} ended: {(said or ['killed'])[-1][:200]}")
        return json.loads(line)

    def end(self) -> None:
        """End it, and what it started."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def pythons(interpreter: str, pfllib_folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the contenders that can run, with their Python; and why the others cannot."""
    found = dict.fromkeys(("bare", "fedntk", "flower-ray"), sys.executable)
    missing = {}
    wanted = {"blazefl": (["blazefl[contrib,reproducibility]"], interpreter)}
    if pfllib_folder:
        wanted["pfllib"] = (["h5py", "matplotlib", "scikit-learn", "torchvision"], sys.executable)
    else:
        missing["pfllib"] = "--pfllib names no checkout"
    for name, (packages, python) in wanted.items():
        try:
            found[name] = environment_of(name, packages, python)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            missing[name] = re.sub(r"\S+://\S+", "...", " ".join(said))[:300]  # no addresses
    return found, missing


def environment_of(name: str, packages: Sequence[str], interpreter: str) -> str:
    """Install packages beside this environment's version of torch, in build/peers; its Python."""
    folder = ROOT / "build" / "peers" / name
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        uv = str(Path(sys.executable).parent / "uv")
        torch_here = f"torch=={torch.__version__.split('+')[0]}"
        for command in (
            ["venv", "--quiet", "--python", interpreter, str(folder)],
            ["pip", "install", "--quiet", "--python", python, *packages, torch_here, "numpy"],
        ):
            subprocess.run([uv, *command], check=True, capture_output=True, text=True)  # noqa: S603
    return python


def in_turns(
    contenders: Sequence[Contender], repeats: int
) -> Iterator[dict[str, dict[str, float]]]:
    """Give each a first round that does not count, then `repeats` rounds in turns."""
    for repeat in range(repeats + 1):
        order = contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]
        times = {contender.name: contender.round() for contender in order}
        if repeat:
            yield times


def measure(
    network: str,
    workers: int,
    found: Mapping[str, str],
    missing: dict[str, str],
    repeats: int,
    base: Mapping[str, Any],
) -> Rows:
    """Measure rounds of all contenders with one network and number of workers."""
    case = {"network": network, "workers": workers, "rounds": repeats + 1, **base}
    started: list[Contender] = []
    scratch = Path(base["examples"])
    rows = []
    try:
        for name in CONTENDERS:
            if name in found:
                try:
                    started.append(Contender(name, found[name], case, scratch))
                except RuntimeError as error:
                    print("left out:", error, flush=True)
                    missing[name] = str(error)
        for number, times in enumerate(in_turns(started, repeats), 1):
            for name, own in times.items():
                row = {"network": network, "workers": workers, "contender": name, "round": number}
                rows.append({**row, **own, "load": os.getloadavg()[0]})
            print({name: round(own["seconds"], 3) for name, own in times.items()}, flush=True)
    finally:
        for contender in started:
            contender.end()
    return rows


def compared(rows: Rows) -> dict[str, Any]:
    """Median seconds of each contender, and medians of the ratios of neighbouring rounds."""
    found: dict[str, Any] = {}
    for case in dict.fromkeys((row["network"], row["workers"]) for row in rows):
        own = [row for row in rows if (row["network"], row["workers"]) == case]
        seconds = {
            name: [row["seconds"] for row in own if row["contender"] == name]
            for name in dict.fromkeys(row["contender"] for row in own)
        }
        seconds["fedntk, in-round"] = [r["in-round"] for r in own if r["contender"] == "fedntk"]
        cpu = {
            name: [row["cpu-seconds"] for row in own if row["contender"] == name]
            for name in seconds.keys() - {"fedntk, in-round", "flower-ray"}
        }
        found["{}, {} workers".format(*case)] = {
            "median-seconds": {k: round(statistics.median(v), 4) for k, v in seconds.items()},
            "over-bare": {k: _ratio(v, seconds["bare"]) for k, v in seconds.items()},
            "over-fedntk": {k: _ratio(v, seconds["fedntk"]) for k, v in seconds.items()},
            "cpu-over-bare": {k: _ratio(v, cpu["bare"]) for k, v in sorted(cpu.items())},
            "cpu-over-fedntk": {k: _ratio(v, cpu["fedntk"]) for k, v in sorted(cpu.items())},
            "load": round(statistics.median(row["load"] for row in own), 1),
        }
    return found


def _ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(seconds, others, strict=True)), 3)


# ------------------------------------------------------------------ start-up on Ray


def start_up(times: int, before: str, base: Mapping[str, Any]) -> Rows:
    """Seconds from the start of a run on Ray until its first round begins, and ends."""
    ways: dict[str, Callable[[Mapping[str, Any], Path], list[float]]] = {
        "fedntk": lambda case, out: fedntk_on_ray(case, out, sys.executable),
        "flower": flower_by_flwr_run,
    }
    if before:
        ways["fedntk-before"] = lambda case, out: fedntk_on_ray(case, out, before)
    rows = []
    for repeat in range(times):
        for name, begin in ways.items():
            with tempfile.TemporaryDirectory() as out:
                case = {"network": "mlp-100", "rounds": 1, **base}
                start = time.time()
                first, after = begin(case, Path(out))
            row = {
                "start-up": name,
                "round": repeat,
                "first": first - start,
                "after": after - start,
            }
            rows.append({**row, "load": os.getloadavg()[0]})
            print(rows[-1], flush=True)
    return rows


def fedntk_on_ray(case: Mapping[str, Any], out: Path, python: str) -> list[float]:
    """Return the times of day when the first round began and ended, by the command."""
    ours(case, str(out / "run")).save(out / "config.toml")
    command = [python, "-m", "fedntk.simulations.cli", "run", str(out / "config.toml")]
    records, times = out / "run" / "rounds.jsonl", list[float]()
    with subprocess.Popen([*command, "--engine", "ray", "--quiet"]) as process:  # noqa: S603
        while process.poll() is None:
            lines = records.read_text(encoding="utf-8").count("\n") if records.exists() else 0
            times += [time.time()] * (lines - len(times))
            time.sleep(0.02)
    return times[:2]


def flower_by_flwr_run(case: Mapping[str, Any], out: Path) -> list[float]:
    """Return the same of stock_app, by ``flwr run``."""
    import tomli_w

    from fedntk.simulations.engine.flwr_run import superlink
    from fedntk.simulations.engine.processes import tool

    (out / "settings.toml").write_text(
        tomli_w.dumps(stock_options(case, str(out / "times.npy"))), encoding="utf-8"
    )
    with superlink(out / "flwr") as (_, environment):
        command = [
            *(tool("flwr"), "run", str(STOCK), "fedntk", "--stream"),
            *("--run-config", str(out / "settings.toml")),
            *("--federation-config", f"num-supernodes={CLIENTS}"),
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603
    return np.load(out / "times.npy").tolist()


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--networks", default=",".join(MODELS))
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--peers", default="3.13", help="Python for BlazeFL")
    parser.add_argument("--pfllib", default="", help="checkout of PFLlib")
    parser.add_argument("--only", default="", help="contenders, by commas; writes nothing")
    parser.add_argument("--start-up", type=int, default=3, help="repeats; 0: none")
    parser.add_argument("--before", default="", help="Python that has another fedntk installed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        case = json.loads(chosen.child)
        CONTENDERS[case["contender"]](case)
        os._exit(0)
    if not chosen.data_dir:
        parser.error("--data-dir is needed")
    found, missing = pythons(chosen.peers, chosen.pfllib)
    if chosen.only:
        found = {name: found[name] for name in chosen.only.split(",")}
    print("left out:", missing, flush=True)
    before, rows, started = os.getloadavg(), [], []
    with tempfile.TemporaryDirectory() as scratch:
        base = {"examples": scratch, "data-dir": str(Path(chosen.data_dir).resolve())}
        base["pfllib"] = chosen.pfllib
        prepare(base)
        for network in chosen.networks.split(","):
            for workers in map(int, chosen.workers.split(",")):
                rows += measure(network, workers, found, missing, chosen.repeats, base)
        if chosen.start_up:
            started = start_up(chosen.start_up, chosen.before, base)
    summary = {
        "machine": machine("cpu") | {"load-before": before, "load-after": os.getloadavg()},
        "left-out": missing,
        "rounds": compared(rows),
        "start-up-seconds": {
            name: {
                key: round(statistics.median(r[key] for r in started if r["start-up"] == name), 1)
                for key in ("first", "after")
            }
            for name in dict.fromkeys(row["start-up"] for row in started)
        },
    }
    if chosen.only:
        print(json.dumps(summary, indent=2))
    else:
        write("engine", rows + started, summary)


def prepare(base: Mapping[str, Any]) -> None:
    """Write the examples and the split that fedntk has, for the others."""
    from fedntk.simulations.engine.building import load_setup

    setup = load_setup(ours({"network": "mlp-100", "rounds": 1, **base}, base["examples"]))
    x, y = setup.data.train(np.arange(len(setup.data.y_train)))
    folder = Path(base["examples"])
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "y.npy", y.numpy())
    np.save(folder / "clients.npy", np.stack(setup.split.clients))


if __name__ == "__main__":
    _out = os.fdopen(os.dup(1), "w")  # what frameworks print goes to the log
    if "--child" in sys.argv:
        os.dup2(2, 1)
    main()
