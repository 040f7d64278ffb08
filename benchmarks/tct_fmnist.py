"""TCT on non-IID Fashion-MNIST beside FedAvg, FedProx and SCAFFOLD; its variants; MNIST.

Yu et al. 2022, section 5, at a smaller size: 10 clients, SimpleCNN, 5 local epochs of batches of
64, but 5,000 training images instead of 60,000 and 30 rounds for each method instead of 200, and
TCT has 15 of FedAvg, one for the moments and 14 of stage 2; it then goes on to 50 rounds of
stage 2 (100 in the paper). The test set is whole. One seed: all runs of a partition share the split
and the first weights.

    python benchmarks/tct_fmnist.py PART --data-dir FOLDER [--processes 3] [--out FOLDER]

Parts, each with results/tct_<part>.csv and .json beside this file:

table2
    Table 2 (and a picture): four partitions, four methods. The local learning rate of a method is
    the best of four after a few rounds on #C=2; TCT has FedAvg's in stage 1, and its eta of stage
    2 is also the best of three on #C=2.
variants
    On #C=2, from one FedAvg model: normalisation, loss, features, optimiser, solver (figures 4
    and 5, tables 11 and 12, and what the paper lacks).
mnist
    The authors' example: 5 clients, two digits each; how close stage 2 comes to the ridge solution.
"""

import argparse
import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import CONF, RESULTS, parse_options, write
from flwr.app import Array, ArrayRecord, Context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tct_statistics import PARTITIONS, Settings, percent
from torch import nn

from fedntk.clients import BootstrapSGD, TCTClient, client_app
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import TCTModel, one_hot, ridge_regression
from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.models import build_model, simple_cnn
from fedntk.simulations.report.figures import COLOURS
from fedntk.simulations.report.results import Run
from fedntk.strategies import TCT, SeededFedAvg

CONFIGURATION = CONF / "tct_fmnist.toml"

TRAIN_EXAMPLES, STAGE_1, STAGE_2 = 5000, 15, 14
ROUNDS = STAGE_1 + 1 + STAGE_2
LONG = 50  # rounds of stage 2 in the end; the paper has 100
TRIAL, RATES, ETAS = 8, (0.1, 0.03, 0.01, 0.003), (5e-5, 1.6e-5, 5e-6)
TUNED = "#C=2"
NETWORK = "tct_fmnist:channels_last"
BASELINES: dict[str, Settings] = {
    "FedAvg": {"method": "fedavg"},
    "FedProx": {"method": "fedavg", "fedavg.proximal_mu": 0.01},
    "SCAFFOLD": {"method": "scaffold", "scaffold.option": "II"},
}
METHODS = (*BASELINES, "TCT")
PAPER = {  # Table 2, in %
    "FedAvg": (35.10, 85.18, 86.18, 90.09),
    "FedProx": (50.04, 84.91, 86.31, 89.77),
    "SCAFFOLD": (12.80, 42.80, 83.87, 89.40),
    "TCT": (86.32, 90.33, 90.78, 91.13),
}

VARIANT_ROUNDS = 25
FEW = {"test_examples": 2000, "tct.dtype": "float32"}
ETA = "table2's eta"  # in settings: times this number
CE = {"tct.loss": "cross-entropy"}
LAST = {"tct.features": "last-layer"}
# variant -> candidates, of which the best counts
VARIANTS: dict[str, list[Settings]] = {
    "TCT": [{}],
    "no normalisation": [
        {"tct.normalise": False, "tct.learning_rate": rate} for rate in (0.01, 0.1, 0.5)
    ],
    "cross-entropy": [CE | {ETA: factor} for factor in (1, 10)],
    "all coordinates": [  # 4.2 times as many, and eigenvalues so much larger
        {"tct.num_features": 0, ETA: 1 / 4.2, "tct.dtype": "float16"}
    ],
    "last layer": [LAST | {"tct.learning_rate": rate} for rate in (1e-3, 1e-2)],
    "last layer, cross-entropy": [
        LAST | CE | {"tct.learning_rate": rate} for rate in (1e-3, 1e-2, 1e-1)
    ],
    "FedAvg in stage 2": [{"tct.optimizer": "fedavg"}],
    "gradient descent in stage 2": [
        {"tct.optimizer": "gd", "tct.learning_rate": rate} for rate in (5e-5, 2e-4)
    ],
    "the paper's eta": [{"tct.learning_rate": 5e-5}],
    "no stage 1": [{"weights": ""}],
}
PAPER_VARIANTS = {  # FMNIST, #C=2, in %
    "TCT": ("Table 2", 90.33),
    "cross-entropy": ("Table 11", 89.23),
    "all coordinates": ("Table 11", 90.36),
    "last layer, cross-entropy": ("Table 12", 83.96),
}


def table2(options: argparse.Namespace) -> None:
    jobs = [(options, TUNED, method, rate, TRIAL) for method in BASELINES for rate in RATES]
    trials = in_processes(options, trained, jobs)
    tried: dict[str, dict[float, float]] = {}
    for (_, _, method, rate, _), done in zip(jobs, trials, strict=True):
        tried.setdefault(method, {})[rate] = round(float(done.curve().loc[1:TRIAL].max()), 4)
    rates = {method: max(found, key=found.__getitem__) for method, found in tried.items()}
    stage_1(options, TUNED, rates["FedAvg"])
    etas = [(options, TUNED, rates["FedAvg"], eta, STAGE_2) for eta in ETAS]
    found_etas = {
        eta: round(float(done.curve().loc[2 : 1 + STAGE_2].max()), 4)
        for eta, done in zip(ETAS, in_processes(options, tct, etas), strict=True)
    }
    eta = max(found_etas, key=found_etas.__getitem__)
    long = [(options, partition, rates["FedAvg"], eta) for partition in PARTITIONS]
    rest = [
        (options, partition, method, rates[method], ROUNDS)
        for partition in PARTITIONS
        for method in ("FedProx", "SCAFFOLD")
    ]
    in_processes(options, bootstrapped, long, trained, rest)

    rows, cells = [], {}
    for position, partition in enumerate(PARTITIONS):
        for method in METHODS:
            rate = rates.get(method, rates["FedAvg"])
            curve = found_curve(options, partition, method, rate, eta)
            case = {"partition": partition, "method": method, "learning-rate": rate}
            rows += [{**case, "round": r, "accuracy": value} for r, value in curve.items()]
            within = curve[curve.index <= ROUNDS]
            cell = {"final": percent(within.iloc[-1]), "best": percent(within.max())}
            cell["paper"] = PAPER[method][position]
            if method == "TCT":
                cell[f"after {LONG} rounds of stage 2"] = percent(curve.iloc[-1])
            cells.setdefault(partition, {})[method] = cell
    table = pd.DataFrame(rows)
    summary = {
        "learning rates": {
            "chosen": rates,
            f"best accuracy within {TRIAL} rounds on {TUNED}": tried,
        },
        "stage 2": {
            "eta": eta,
            f"best accuracy within {STAGE_2} rounds of stage 2 on {TUNED}, by eta": found_etas,
        },
        "accuracy in %": cells,
    }
    write("tct_table2", table, summary)
    drawn(table).savefig(RESULTS / "tct_table2.png")


def variants(options: argparse.Namespace) -> None:
    chosen = json.loads((RESULTS / "tct_table2.json").read_text(encoding="utf-8"))
    rate = chosen["learning rates"]["chosen"]["FedAvg"]
    eta = chosen["stage 2"]["eta"]
    cases = {name: [with_eta(one, eta) for one in all_] for name, all_ in VARIANTS.items()}
    stage_1(options, TUNED, rate)
    jobs = [
        (options, TUNED, rate, f"{name} of variants {i}", FEW | settings)
        for name, candidates in cases.items()
        for i, settings in enumerate(candidates)
    ]
    done = iter(in_processes(options, convexified, jobs))
    rows, found = [], {}
    for name, candidates in cases.items():
        tries: list[Settings] = []
        for settings, result in zip(candidates, done, strict=False):
            curve, sent = result.curve(), result.curve("bytes-up")
            first = 2 if settings.get("tct.normalise", True) else 1  # round of the linear model
            case = {"variant": name, "settings": json.dumps(settings)}
            rows += [
                {**case, "round": r, "accuracy": value, "bytes-up": sent[r]}
                for r, value in curve.items()
            ]
            one = {
                "settings": settings, "final": percent(curve.iloc[-1]),
                "best": percent(curve.loc[first:].max()), "rounds": len(curve) - 1,
                "MB up in total": round(float(sent.sum() / 1e6), 1),
            }  # fmt: skip
            if len(lambdas := result.curve("rate-times-lambda")):
                one["rate times lambda"] = round(float(lambdas.max()), 3)
            if unchanged := result.summary["rounds-unchanged"]:  # it diverged
                one |= {"rounds-unchanged": unchanged, "final": None, "best": None}
            if name == "TCT":
                one["after one round of stage 2"] = percent(curve.loc[2])
            tries.append(one)
        found[name] = max(tries, key=lambda one: one["best"] or 0)
        if name in PAPER_VARIANTS:
            found[name]["paper"] = PAPER_VARIANTS[name]
        if len(tries) > 1:
            keys = ("settings", "final", "best")
            found[name]["tried"] = [[one[key] for key in keys] for one in tries]
    start = next(row["accuracy"] for row in rows if (row["variant"], row["round"]) == ("TCT", 0))
    write("tct_variants", rows, {"FedAvg's model": percent(start), "accuracy in %": found})


def mnist(options: argparse.Namespace, *, rounds: int = 100) -> None:
    config = Config(dataset="mnist", model="simple-cnn", data_dir=options.data_dir)
    data = load_data(config)
    network = build_model(config, data.input_shape, data.num_classes)
    x_test, y_test = data.test()
    firsts = [np.nonzero(data.y_train == digit)[0][:250] for digit in range(10)]
    scratch = tempfile.TemporaryDirectory()

    def client(context: Context) -> NumPyClient:
        torch.set_num_threads(1)
        k = int(context.node_config["partition-id"])
        return TCTClient(
            network, *data.train(np.concatenate(firsts[2 * k : 2 * k + 2])),
            cache=scratch.name, seed=(0, k),
            sgd=BootstrapSGD(learning_rate=0.05),
        )  # fmt: skip

    first_rounds = 5
    curve: dict[int, float] = {}
    models: dict[int, torch.Tensor] = {}

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        named = {name: array.numpy() for name, array in arrays.items()}
        if server_round <= first_rounds:
            state = {name: torch.from_numpy(named[name].copy()) for name in network.state_dict()}
            network.load_state_dict(state)
            with torch.no_grad():
                scores = torch.cat([network(part) for part in x_test.split(500)])
            curve[server_round] = accuracy(scores, y_test)
        elif named[TCTModel.ARRAYS[0]].any():
            models[server_round] = torch.from_numpy(named[TCTModel.ARRAYS[0]].copy())

    common = {"network": network, "min_available_nodes": 5, "fraction_evaluate": 0.0}
    bootstrap = SeededFedAvg(min_available_nodes=5, fraction_evaluate=0.0)
    strategy = TCT(bootstrap=bootstrap, bootstrap_rounds=first_rounds, **common)
    first = ArrayRecord({k: Array(v.numpy()) for k, v in network.state_dict().items()})
    grid = LocalGrid(client_app(client), 5, {"run": "clients"})
    result = strategy.start(grid, first, first_rounds + 1 + rounds, evaluate_fn=evaluate)

    predictor = strategy.predictor(result.arrays)
    x, y = data.train(np.concatenate(firsts))
    z = torch.cat(list(predictor.features(x))).double()
    targets = one_hot(y, 10).double() - 1 / 10
    means = z.mean(0)
    dual = ridge_regression((z - means) @ (z - means).T, targets - targets.mean(0), 1e-4)
    exact = (z - means).T @ dual
    exact = torch.cat([exact, (targets.mean(0) - means @ exact)[None]]).float()
    # features of the test set once, for the linear models of all rounds
    together = torch.cat([*models.values(), exact], 1)
    products = torch.cat([TCTModel.scores(z, together) for z in predictor.features(x_test)])
    *scores, ridge = products.split(10, 1)
    scratch.cleanup()

    rows = [{"round": r, "model": "network", "accuracy": a} for r, a in curve.items()]
    rows += [
        {
            "round": server_round, "model": "linear", "accuracy": accuracy(own, y_test),
            "distance": float((own - ridge).norm() / ridge.norm()),
        }
        for server_round, own in zip(models, scores, strict=True)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    linear = table[table.model == "linear"].set_index("round")
    linear.index -= first_rounds + 1  # rounds of stage 2
    summary = {
        "accuracy in %": {
            f"FedAvg after {first_rounds} rounds": percent(curve[first_rounds]),
            "TCT, final": percent(linear.accuracy.iloc[-1]),
            "TCT, best": percent(linear.accuracy.max()),
            "exact ridge regression (1e-4)": percent(accuracy(ridge, y_test)),
        },
        "rounds of stage 2: accuracy in %, distance of the test scores from the ridge solution's "
        "over their norm": {
            str(r): [percent(linear.accuracy[r]), round(float(linear.distance[r]), 4)]
            for r in (1, 2, 5, 10, 20, 50, 100)
            if r <= rounds
        },
        "nearest to the ridge solution": {
            "round of stage 2": int(linear.distance.idxmin()),
            "distance": round(float(linear.distance.min()), 4),
        },
    }
    write("tct_mnist", table, summary)


def channels_last(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """SimpleCNN in the order of numbers in which a CPU pools and convolves faster; for SGD."""
    network = simple_cnn(input_shape, num_classes)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def settled(options: argparse.Namespace, partition: str, name: str, **settings: Any) -> Config:
    words = [part.translate(str.maketrans(" ,()#=", "------")) for part in (partition, name)]
    folder = Path(options.out).absolute().joinpath(*words)
    return Config.load(
        CONFIGURATION,
        **PARTITIONS[partition],
        **{
            "train_examples": TRAIN_EXAMPLES, "server_threads": 1, "data_dir": options.data_dir,
            "out": folder, "name": name, **settings,
        },
    )  # fmt: skip


def ran(config: Config) -> Run:
    """Run, or go on; a run that was asked for more rounds before gets these."""
    saved = config.folder / "config.toml"
    rounds = max(config.rounds, Config.load(saved).rounds if saved.exists() else 0)
    return run(config.replace(rounds=rounds), progress=False)


def trained(
    options: argparse.Namespace, partition: str, method: str, rate: float, rounds: int
) -> Run:
    settings = BASELINES[method] | {"learning_rate": rate, "rounds": rounds, "model": NETWORK}
    return ran(settled(options, partition, f"{method} {rate:g}", **settings))


def stage_1(options: argparse.Namespace, partition: str, rate: float) -> Path:
    """Return the file of FedAvg's model after stage 1, run if it is not there."""
    kept = settled(options, partition, f"FedAvg {rate:g}").folder / f"round-{STAGE_1}.safetensors"
    if not kept.exists():
        done = trained(options, partition, "FedAvg", rate, STAGE_1)
        shutil.copyfile(done.folder / "model.safetensors", kept)
    return kept


def bootstrapped(options: argparse.Namespace, partition: str, rate: float, eta: float) -> Run:
    result = tct(options, partition, rate, eta, LONG)
    trained(options, partition, "FedAvg", rate, ROUNDS)
    return result


def tct(options: argparse.Namespace, partition: str, rate: float, eta: float, rounds: int) -> Run:
    settings = {"tct.learning_rate": eta, "rounds": 1 + rounds}
    return convexified(options, partition, rate, f"TCT {eta:g}", settings)


def with_eta(settings: Settings, eta: float) -> Settings:
    """Settle a variant's eta: its own, or a multiple of table2's."""
    rest = {name: value for name, value in settings.items() if name != ETA}
    return {"tct.learning_rate": eta * settings.get(ETA, 1)} | rest


def convexified(
    options: argparse.Namespace, partition: str, rate: float, name: str, settings: Settings
) -> Run:
    common = {
        "weights": str(stage_1(options, partition, rate)),
        "tct.bootstrap_rounds": 0,
        "rounds": VARIANT_ROUNDS,
        "learning_rate": rate,
    }
    return ran(settled(options, partition, name, **common | settings))


def found_curve(
    options: argparse.Namespace, partition: str, method: str, rate: float, eta: float
) -> "pd.Series[float]":
    if method != "TCT":
        return trained(options, partition, method, rate, ROUNDS).curve()
    fedavg = trained(options, partition, "FedAvg", rate, ROUNDS).curve().loc[:STAGE_1]
    own = tct(options, partition, rate, eta, LONG).curve().loc[1:]
    own.index += STAGE_1
    return pd.concat([fedavg, own])


def in_processes(
    options: argparse.Namespace, *work: Callable[..., Run] | Sequence[tuple[Any, ...]]
) -> list[Run]:
    """Call each function with each of the arguments that follow it; return all in order."""
    calls = [
        (call, arguments)
        for call, jobs in zip(work[::2], work[1::2], strict=True)
        for arguments in jobs
    ]
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(options.processes, spawn) as pool:
        return [future.result() for future in [pool.submit(c, *a) for c, a in calls]]


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return float((scores.argmax(1) == labels).double().mean())


def drawn(table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(8, 6.4), layout="constrained", dpi=130)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    blue, vermilion, green, _, orange, *_ = COLOURS
    styles = {
        "FedAvg": {"color": blue, "lw": 1.4},
        "FedProx": {"color": orange, "lw": 1.2, "ls": "--"},
        "SCAFFOLD": {"color": green, "lw": 1.4},
        "TCT": {"color": vermilion, "lw": 2.2},
    }
    for position, (axes, partition) in enumerate(zip(panels.flat, PARTITIONS, strict=True)):
        axes.axvline(ROUNDS, color="0.75", lw=0.8)
        for method, style in styles.items():
            part = table[(table.partition == partition) & (table.method == method)]
            part = part[part["round"] >= (STAGE_1 if method == "TCT" else 0)]
            axes.plot(part["round"], 100 * part.accuracy, **style)
            if method in ("FedAvg", "TCT"):
                axes.axhline(PAPER[method][position], color=style["color"], lw=1, ls=":")
        axes.set_title(partition, fontsize=10)
        axes.set(xlim=(0, STAGE_1 + 1 + LONG), ylim=(0, 100) if position < 2 else (50, 95))
        axes.grid(alpha=0.25)
    for axes in panels[1]:
        axes.set_xlabel("communication round")
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    lines = [Line2D([], [], **style) for style in styles.values()]
    lines += [Line2D([], [], color="0.3", lw=1, ls=":"), Line2D([], [], color="0.75", lw=0.8)]
    names = [*styles, "the paper's TCT and FedAvg", f"{ROUNDS} rounds"]
    figure.legend(lines, names, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle(
        f"Fashion-MNIST, {TRAIN_EXAMPLES:,} training images (the paper: 60,000) on 10 clients",
        fontsize=11,
    )
    return figure


PARTS = {"table2": table2, "variants": variants, "mnist": mnist}


def main() -> None:
    options = parse_options(__doc__, part=PARTS, data_dir=True, out="", processes=3)
    with tempfile.TemporaryDirectory() as scratch:
        options.out = options.out or scratch
        PARTS[options.part](options)


if __name__ == "__main__":
    main()
