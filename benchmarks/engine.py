"""Rounds of FedAvg beside a bare torch loop over the same batches and beside other frameworks.

    python benchmarks/engine.py --data-dir DATA [--repeats 11] [--networks mlp-100,simple-cnn]
        [--workers 1,2] [--peers 3.13] [--pfllib FOLDER] [--only NAMES]

Fashion-MNIST, 100 clients x 600 images, 10 clients a round, one epoch in batches of 10, one torch
thread in each worker, no evaluation. Each contender is a process of its own. They take
turns round by round, so that other work on the machine slows all of them alike.
What is compared are medians over the rounds, and medians of the ratios of neighbouring rounds. On a
busy machine, seconds of the CPU ("cpu") tell more than those of the clock; Ray's are not counted.

"bare" is a loop over clients and batches with torch's SGD, and the mean of the weights. "fedntk" is
``fedntk.simulations.run`` on the local engine with its records and checkpoints ("seconds"), and the
same without these ("in-round"). "flower-ray" is stock.py, only Flower. BlazeFL is
installed into an environment of its own in build/peers, for which `--peers` names a Python that it
takes; one worker is its trainer of one client after another, more are its threads. PFLlib is run
from a checkout of it, if `--pfllib` names one, with as many torch threads as there are workers, as
it trains one client after another. A peer that cannot be installed is named and left out.

With `--only`, names of contenders by commas, it writes nothing.

Needs fedntk installed.
"""

import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import NETWORKS, ROOT, parse_options, write
from torch import Tensor, nn
from turns import Contestant

CLIENTS, PER_ROUND, BATCH, RATE = 100, 10, 10, 0.05
MODELS = {"mlp-100": "mlp", "simple-cnn": "simple-cnn"}  # names of the simulations
Rows = list[dict[str, Any]]
started: list[float] = []  # of a contender's round: seconds by the clock, and of the CPU


# ------------------------------------------------------------------ contenders, a process each


def turn(**more: float) -> None:
    """Say how long the round took, and wait until the next one is wanted."""
    if started:
        more["seconds"] = time.perf_counter() - started[0]
        more["cpu-seconds"] = time.process_time() - started[1]
        print("took", json.dumps(more), file=_out, flush=True)
    if not sys.stdin.readline():
        os._exit(0)
    started[:] = time.perf_counter(), time.process_time()


def examples(folder: str) -> tuple[Tensor, Tensor, np.ndarray]:
    x, y = (torch.from_numpy(np.load(Path(folder) / f"{name}.npy")) for name in "xy")
    return x, y, np.load(Path(folder) / "clients.npy")


def bare(case: Mapping[str, Any]) -> None:
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
    from fedntk.simulations import run

    def on_round(record: Mapping[str, Any]) -> None:
        turn(**{"in-round": record["seconds"]})

    with tempfile.TemporaryDirectory() as out:
        run(ours(case, out), workers=case["workers"], progress=False, on_round=on_round)


def ours(case: Mapping[str, Any], out: str) -> Any:
    """Return the configuration of fedntk; one test example, as no test is to be timed."""
    from fedntk.simulations import Config

    return Config(
        method="fedavg", dataset="fashion-mnist", data_dir=case["data-dir"], partition="iid",
        num_clients=CLIENTS, clients_per_round=PER_ROUND, clients_per_evaluation=0,
        test_examples=1, model=MODELS[case["network"]], batch_size=BATCH, learning_rate=RATE,
        rounds=case["rounds"], device="cpu", out=out,
    )  # fmt: skip


def flower_ray(case: Mapping[str, Any]) -> None:
    options = {
        "network": case["network"], "examples": case["examples"], "batch-size": BATCH,
        "learning-rate": RATE, "num-clients": CLIENTS, "clients-per-round": PER_ROUND,
        "rounds": case["rounds"],
    }  # fmt: skip
    os.environ |= {"STOCK": json.dumps(options), "PYTHONPATH": str(Path(__file__).parent)}
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


def blazefl(case: Mapping[str, Any]) -> None:
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
        "model_selector": Selector(), "model_name": case["network"], "dataset": Dataset(),
        "num_clients": CLIENTS, "device": "cpu", "batch_size": BATCH, "seed": 0,
    }  # fmt: skip
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
        "model": NETWORKS[case["network"]][0](), "device": "cpu", "dataset": "engine",
        "num_classes": 10, "global_rounds": case["rounds"], "local_epochs": 1,
        "batch_size": BATCH, "local_learning_rate": RATE, "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0, "num_clients": CLIENTS,
        "join_ratio": PER_ROUND / CLIENTS, "random_join_ratio": False, "algorithm": "FedAvg",
        "time_threthold": 10000, "client_drop_rate": 0.0, "train_slow_rate": 0.0,
        "send_slow_rate": 0.0, "save_folder_name": "items",
    }  # fmt: skip
    zeros = (
        "few_shot time_select goal top_cnt auto_break eval_gap dlg_gap dlg_eval"
        " batch_num_per_client num_new_clients fine_tuning_epoch_new"
    )
    settings |= dict.fromkeys(zeros.split(), 0)
    with contextlib.redirect_stdout(sys.stderr):
        server = FedAvg(SimpleNamespace(**settings), 0)
    while True:
        turn()
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()


CONTENDERS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "bare": bare, "fedntk": fedntk, "blazefl": blazefl, "pfllib": pfllib, "flower-ray": flower_ray,
}  # fmt: skip


# ------------------------------------------------------------------ who takes turns with whom


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


def measure(
    network: str,
    workers: int,
    found: Mapping[str, str],
    missing: dict[str, str],
    repeats: int,
    base: Mapping[str, Any],
) -> Rows:
    case = {"network": network, "workers": workers, "rounds": repeats + 1, **base}
    rows, contenders = [], dict[str, Contestant]()
    with contextlib.ExitStack() as stack:
        for name in filter(found.__contains__, CONTENDERS):
            log = stack.enter_context((Path(base["examples"]) / f"{name}.log").open("w"))
            threads = {"OMP_NUM_THREADS": str(workers) if name == "pfllib" else "1"}
            command = [found[name], __file__, "--child", json.dumps({"contender": name, **case})]
            contender = Contestant(command, log=log, RAY_DEDUP_LOGS="0", **threads)
            stack.callback(contender.close)
            try:
                contender.ask()  # a first round, which does not count
            except (RuntimeError, BrokenPipeError):
                said = Path(log.name).read_text(errors="replace").strip().splitlines()
                missing[name] = (said or ["killed"])[-1][:200]
                print("left out:", name, missing[name], flush=True)
            else:
                contenders[name] = contender
        for number in range(1, repeats + 1):
            names = [*contenders]
            names = names[number % len(names) :] + names[: number % len(names)]
            times = {name: contenders[name].ask() for name in names}
            for name, own in times.items():
                row = {"network": network, "workers": workers, "contender": name, "round": number}
                rows.append({**row, **own, "load": os.getloadavg()[0]})
            print({name: round(own["seconds"], 3) for name, own in times.items()}, flush=True)
    return rows


def compared(rows: pd.DataFrame) -> dict[str, Any]:
    """Median seconds of each contender, and medians of the ratios of neighbouring rounds."""
    compared_cases = {}
    for (network, workers), table in rows.groupby(["network", "workers"], sort=False):
        by_round = table.pivot(index="round", columns="contender")
        seconds = by_round["seconds"].assign(**{"fedntk, in-round": by_round["in-round", "fedntk"]})
        cpu = by_round["cpu-seconds"].drop(columns="flower-ray", errors="ignore")
        ratios = {
            f"{kind}over-{other}": values.div(values[other], axis=0).median().round(3).to_dict()
            for kind, values in (("", seconds), ("cpu-", cpu))
            for other in ("bare", "fedntk")
        }
        compared_cases[f"{network}, {workers} workers"] = {
            "median-seconds": seconds.median().round(4).to_dict(), **ratios,
            "load": round(float(table.load.median()), 1),
        }  # fmt: skip
    return compared_cases


def main() -> None:
    """Measure, write, print."""
    if sys.argv[1] == "--child":
        case = json.loads(sys.argv[2])
        CONTENDERS[case["contender"]](case)
        os._exit(0)
    chosen = parse_options(
        __doc__, data_dir=True, repeats=11, networks=tuple(MODELS), workers=(1, 2), peers="3.13",
        pfllib="", only="",
    )  # fmt: skip
    found, missing = pythons(chosen.peers, chosen.pfllib)
    if chosen.only:
        found = {name: found[name] for name in chosen.only.split(",")}
    print("left out:", missing, flush=True)
    before, rows = os.getloadavg(), []
    with tempfile.TemporaryDirectory() as scratch:
        base = {"examples": scratch, "data-dir": str(Path(chosen.data_dir).resolve())}
        base["pfllib"] = chosen.pfllib
        prepare(base)
        for network in chosen.networks:
            for workers in chosen.workers:
                rows += measure(network, workers, found, missing, chosen.repeats, base)
    summary = {
        "load-before": before, "load-after": os.getloadavg(), "left-out": missing,
        "rounds": compared(pd.DataFrame(rows)),
    }  # fmt: skip
    if chosen.only:
        print(json.dumps(summary, indent=2))
    else:
        write("engine", rows, summary)


def prepare(base: Mapping[str, Any]) -> None:
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
