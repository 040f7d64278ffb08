"""The cases of speed.py: what is built, what is timed, and the rival beside it.

kernel: Jacobian and tangent kernel of n random examples. The rival contracts the Jacobians of
torch.func, as PyTorch's tutorial does in its "trace" form, which is our kernel times C.

kernel_peers: the same beside neural-tangents 0.6.5 (structured derivatives, compiled before), with
the same weights and examples. `benchmarks/peers/make.sh` makes an environment for it.

tangent_features: of one logit, p coordinates (of 421,642 and 11.2 million, Yu et al. 2022), a
sketch or a projection, beside a forward pass in batches of 64. `loop` has a backward pass for each
example; `floor` has one for the sum over a batch, which gives no example's features.

gradient_norms: of each example, beside a training step (the gradient of the mean loss), Opacus and
vmap, in CPU seconds. The network is in evaluation mode, which makes no difference to it; Opacus
needs training mode.

features: CPU seconds of 100 images of Fashion-MNIST and of the CIFAR-10 subset in scattering
(J = 2, L = 8, with logarithms), in 8,000 cosines after it, and in a forward pass of SimpleCNN.

ntk_fl_round: all that strategy and clients of NTK-FL compute in a round, without Flower's messages:
Jacobians, their wire format, kernel, evolution to 12 candidates (cross-entropy, eta = 0.01, t up to
2,000), and the candidates' losses. Clients have about 200 examples of Fashion-MNIST from
Dirichlet(0.1). `full` couples all outputs and builds no kernel; `mean, unbuilt` is past its memory
budget.

ntk_dfl: the second round on the local engine, with records and checkpoints, without evaluation;
784-100-10, 200 images a client, Dirichlet(0.1), eta = 0.01, t = 800, kappa random neighbours. Bytes
are metered, means over clients; formulas are those of docs/methods/ntk_dfl.md. "through no relay":
if weights travelled to each neighbour.

engine: a round of FedAvg beside a bare torch loop over the same batches. Fashion-MNIST, 100 clients
x 600 images, 10 a round, one epoch in batches of 10, one torch thread a worker, no evaluation.
`fedntk` writes records and checkpoints; `in-round` is without. `flower-ray` is peers/stock.py.
BlazeFL's single worker is its trainer of one client after another, more are its threads. PFLlib is
run from a checkout, `--pfllib`, with a torch thread for each worker. CPU seconds are those of the
process, without Ray's.

many_clients: milliseconds by the clock of a client's visit in a round of FedAvg with 100 visits: an
MLP of 10 hidden units, one step; medians of the first and the last tenth of 100 rounds.

startup: commands and imports, beside the import of torch and Flower; modules are compiled before.

Other groups report figures of their own: see the functions in reports.py.
"""

import copy
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import NETWORKS, ROOT, STEPS, fashion_mnist, make, mlp, relative, use_checkout
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

Facts = dict[str, Any]


@dataclass
class Work:
    """What a way does: a call that is repeated, or a function that returns its own seconds."""

    call: Callable[[], Any] | None = None
    seconds: Callable[[], float] | None = None
    clock: Callable[[], float] = time.perf_counter
    facts: Callable[[], Facts] = dict  # asked for after the measurement


def nothing(*_: Any) -> None:
    """Prepare or check nothing."""


@dataclass(frozen=True)
class Case:
    """Ways to compute one thing; the others' seconds are divided by the rival's."""

    group: str
    name: str
    ways: Mapping[str, Callable[[Any], Work]]
    rival: str = ""
    threads: int = 0  # of torch; as many as there are cores if 0
    cores: int = 0  # the last ones of the machine; all if 0
    turns: int = 5
    values: int = 3  # in a turn
    cuda: bool = False
    data: bool = False  # needs Fashion-MNIST
    timeout: float | None = None
    prepare: Callable[[Any], None] = nothing
    check: Callable[[Any, list[Facts]], None] = nothing
    pythons: Mapping[str, str] = field(default_factory=dict)  # of peers
    programs: Mapping[str, str] = field(default_factory=dict)


ONCE = {"turns": 1, "values": 1}  # what takes long
FEW = {"turns": 3, "values": 1}


# ------------------------------------------------------------------ mathematics


def contraction(model: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, parameters, (example.unsqueeze(0),)).squeeze(0)

    jacobians = vmap(jacrev(outputs), in_dims=(None, 0))(parameters, x)
    flat = [tensor.flatten(2) for tensor in jacobians.values()]
    total = sum(torch.einsum("naf,maf->nm", tensor, tensor) for tensor in flat)
    return total / flat[0].shape[1]


def kernel(network: str, n: int, *ways: str, **options: Any) -> Case:
    def work(way: str, chosen: Any) -> Work:
        use_checkout()
        from fedntk.ntk import jacobian

        model, x = make(network, n, chosen.device)

        def factored(x: Tensor) -> Tensor:
            return jacobian(model, x, device=chosen.device).gram()

        compute = factored if way == "factored" else functools.partial(contraction, model)

        def facts() -> Facts:
            found = {}
            if way == "factored":
                found["kernel-mb"] = 4 * n**2 / 1e6
                found["jacobian-mb"] = jacobian(model, x[:2]).nbytes / 2 * n / 1e6
            if n <= 50 and network != "simple-cnn" and n != 32:
                exact = contraction(copy.deepcopy(model).double(), x.double())
                found["error"] = relative(compute(x), exact)
            return found

        compute(x[:2])  # loads what is loaded once
        return Work(lambda: compute(x), facts=facts)

    made = {way: functools.partial(work, way) for way in ("factored", *ways)}
    return Case("kernel", f"{network} n={n}", made, "factored", cuda=True, **options)


PEER = str(ROOT / "build/peers/neural-tangents/bin/python")


def kernel_peers(network: str, n: int, threads: int) -> Case:
    def prepare(chosen: Any) -> None:
        if not Path(PEER).exists():
            raise RuntimeError("expected build/peers; run benchmarks/peers/make.sh first")
        model, x = make(network, n, "cpu")
        arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        np.savez(Path(chosen.folder) / f"{network}.npz", x=x.numpy(), **arrays)

    def ours(chosen: Any) -> Work:
        use_checkout()
        from fedntk.ntk import jacobian

        model, x = make(network, n, "cpu")

        def call() -> np.ndarray:
            return jacobian(model, x).gram().numpy()

        np.save(Path(chosen.folder) / "fedntk.npy", call())
        return Work(call)

    def check(chosen: Any, rows: list[Facts]) -> None:
        folder = Path(chosen.folder)
        a, b = (np.load(folder / f"{way}.npy") for way in ("fedntk", "neural-tangents"))
        difference = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        if not difference < 1e-4:  # between two programs in float32
            raise RuntimeError(f"the kernels differ by {difference}")
        rows[-1]["error"] = difference

    program = str(ROOT / "benchmarks/peers/kernel_by_neural_tangents.py")
    return Case(
        "kernel_peers", f"{network}, n={n}, {threads} threads",
        {"fedntk": ours, "neural-tangents": nothing}, "fedntk", threads, threads,
        prepare=prepare, check=check, pythons={"neural-tangents": PEER},
        programs={"neural-tangents": program},
    )  # fmt: skip


def loop(model: nn.Module, x: Tensor, coordinates: Tensor) -> Tensor:
    """One backward pass for each example, then its coordinates (Yu et al. 2022, appendix B)."""
    rows = torch.empty(len(x), len(coordinates), dtype=x.dtype)
    for i, example in enumerate(x):
        model.zero_grad()
        model(example.unsqueeze(0))[0, 0].backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        rows[i] = torch.cat([part.flatten() for part in parts])[coordinates]
    return rows


def tangent_features(network: str, p: int, n: int, *ways: str) -> Case:
    def work(way: str, chosen: Any) -> Work:
        use_checkout()
        from fedntk.ntk.features.tangent import TangentFeatures

        model, x = make(network, n, chosen.device)
        total = sum(w.numel() for w in model.parameters())
        drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:p]
        coordinates = drawn.sort().values.to(chosen.device)

        def floor(x: Tensor) -> None:
            for part in x.split(64):
                torch.autograd.grad(model(part)[:, 0].sum(), [*model.parameters()])

        def forward(x: Tensor) -> None:
            with torch.no_grad():
                for part in x.split(64):
                    model(part)

        makers = {"floor": floor, "forward": forward}
        makers["loop"] = functools.partial(loop, model, coordinates=coordinates)
        compute = makers.get(way) or TangentFeatures(model, p, 0, method=way)

        def facts() -> Facts:
            if way not in ("subsample", "loop"):
                return {}
            few = x[:20]
            exact = loop(copy.deepcopy(model).double(), few.double(), coordinates)
            return {"error": relative(compute(few), exact)}

        return Work(lambda: compute(x), facts=facts)

    made = {way: functools.partial(work, way) for way in ("forward", *ways)}
    name = f"{network}, p={p}, n={n}"
    return Case("tangent_features", name, made, "forward", threads=1, cuda=True)


def gradient_norms(n: int) -> Case:
    def work(way: str, chosen: Any) -> Work:
        use_checkout()
        from fedntk.ntk import gradient_norms

        model, x = make("resnet18-gn", n, "cpu")
        y, loss = torch.randint(10, (n,)), nn.CrossEntropyLoss(reduction="none")
        exact = gradient_norms(copy.deepcopy(model).double(), x[:4].double(), y[:4], loss)

        def step(x: Tensor, y: Tensor) -> None:
            torch.autograd.grad(loss(model(x), y).mean(), [*model.parameters()])

        if way == "step":
            return Work(lambda: step(x, y), clock=time.process_time)
        makers = {"opacus": by_opacus, "vmap, 16 at a time": by_vmap}
        compute = makers[way](model) if way in makers else (
            lambda x, y: gradient_norms(model, x, y, loss)
        )  # fmt: skip
        found = compute(x[:4], y[:4]).detach().double()
        error = float(((found - exact) / exact).abs().max())
        return Work(lambda: compute(x, y), clock=time.process_time, facts=lambda: {"error": error})

    ways = ("step", "factors", "opacus", "vmap, 16 at a time")
    made = {way: functools.partial(work, way) for way in ways}
    return Case("gradient_norms", f"resnet18-gn, n={n}", made, "step", 1, **FEW)


def by_opacus(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Opacus' fast gradient clipping: ghost norms of the layers for which it has them."""
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )

    wrapped = GradSampleModuleFastGradientClipping(model.train(), loss_reduction="sum")

    def norms(x: Tensor, y: Tensor) -> Tensor:
        wrapped.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        return wrapped.get_norm_sample()

    return norms


def by_vmap(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(model, parameters, (example.unsqueeze(0),))
        return nn.functional.cross_entropy(outputs, label.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def norms(x: Tensor, y: Tensor) -> Tensor:
        found = []
        for part in zip(x.split(16), y.split(16), strict=True):
            rows = [g.flatten(1).norm(dim=1) for g in gradients(parameters, *part).values()]
            found.append(torch.stack(rows).norm(dim=0))
        return torch.cat(found)

    return norms


def features(dataset: str) -> Case:
    def work(way: str, chosen: Any) -> Work:
        from fedntk.ntk.features.layers import FourierFeatures
        from fedntk.simulations import Config
        from fedntk.simulations.engine.building import load_setup

        source = dataset if dataset == "fashion-mnist" else f"hf:{chosen.data_dir}/CIFAR10-jpeg"
        network, _, size = way.partition(", ")
        models = {"SimpleCNN": "simple-cnn", "EfficientNet-Lite0": "efficientnet-lite0"}
        config = Config(
            method="afl", dataset=source, data_dir=chosen.data_dir, num_clients=1, partition="iid",
            model=models.get(network, "scattering"), standardise=network in models,
            image_size=int(size.split()[0]) if size else 0,
        )  # fmt: skip
        setup = load_setup(config)
        if setup.frozen is not None:
            inputs = setup.data.inputs(setup.data.x_train[:100])
            return Work(functools.partial(setup.frozen, inputs), clock=time.process_time)
        module, x = setup.network.eval(), setup.data.train(np.arange(100))[0]
        if way != "SimpleCNN":
            module = nn.Sequential(*list(setup.network)[:-1])
        if way == "8,000 cosines of scattering":
            x, module = module(x), FourierFeatures(setup.network[-1].in_features, 8000, 0, 1.6)

        def call() -> None:
            with torch.no_grad():
                module(x)

        return Work(call, clock=time.process_time)

    ways = ["SimpleCNN", "scattering", "8,000 cosines of scattering"]
    if dataset != "fashion-mnist":
        ways += ["EfficientNet-Lite0, 96 pixels", "EfficientNet-Lite0, 224 pixels"]
    made = {way: functools.partial(work, way) for way in ways}
    return Case("features", dataset, made, "SimpleCNN", 1, data=True)


def ntk_fl_round(clients: int, kernel: str) -> Case:
    def work(chosen: Any) -> Work:
        use_checkout()
        from fedntk.ntk import Jacobian, JacobianUpload, jacobian, loss_value, one_hot
        from fedntk.ntk.evolution.candidates import Candidates
        from fedntk.ntk.evolution.gradient_flow import GradientFlow

        device = chosen.device
        x, labels, sizes = fashion_mnist(chosen.data_dir, clients)
        torch.manual_seed(0)
        model = mlp().eval().to(device)
        weights = {name: w.cpu().numpy().copy() for name, w in model.state_dict().items()}
        shapes = {name: w.shape for name, w in weights.items()}
        pictures, targets = x.to(device).split(sizes), one_hot(labels, 10).split(sizes)
        parts: Facts = {}

        def upload(x: Tensor, y: Tensor) -> Facts:
            with torch.no_grad():
                outputs = model(x).cpu()
            return JacobianUpload(jacobian(model, x), outputs, y).to_arrays()

        def load(arrays: Mapping[str, np.ndarray]) -> None:
            model.load_state_dict({name: torch.from_numpy(w) for name, w in arrays.items()})

        def one_round() -> None:
            marks = [time.perf_counter()]

            def mark(name: str) -> None:
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())
                parts[name] = marks[-1] - marks[-2]

            sent = [upload(x, y) for x, y in zip(pictures, targets, strict=True)]
            mark("jacobians-s")
            tensors = {name: torch.from_numpy(w) for name, w in weights.items()}
            uploads = [
                JacobianUpload.from_arrays(arrays, parameters=shapes, weights=tensors)
                for arrays in sent
            ]
            whole = Jacobian.concatenate([u.jacobian for u in uploads]).to(device)
            outputs = torch.cat([u.outputs for u in uploads]).to(device)
            of_all = torch.cat([u.targets for u in uploads]).to(device)
            mark("stacking-s")
            flow = GradientFlow(
                loss="cross-entropy", learning_rate=0.01, steps=STEPS,
                kernel="full" if kernel == "full" else "mean",
                memory_budget=0 if kernel == "mean, unbuilt" else None,
            )  # fmt: skip
            candidates = Candidates.of(weights, whole, outputs, of_all, flow)
            parts["kernel-products"] = candidates.evolution.kernel_products
            mark("kernel-and-evolution-s")
            losses = []
            for row in range(len(STEPS)):
                load(candidates.weights_at(row))
                total = 0.0
                for x, y in zip(pictures, targets, strict=True):
                    with torch.no_grad():
                        total += len(y) * loss_value(model(x).cpu(), y, "cross-entropy")
                losses.append(total / sum(sizes))
            load(weights)
            parts["best-loss"] = min(losses)
            mark("candidates-s")

        jacobian(model, pictures[0][:2])  # loads what is loaded once
        rival = {}
        if (clients, kernel) == (5, "mean"):  # measured once, on four CPU cores
            rival = {"rival": "the authors' program", "rival-seconds": 208}
        return Work(one_round, facts=lambda: {**rival, "clients": clients, **parts})

    often = ONCE if clients > 20 or kernel == "mean, unbuilt" else FEW
    name = f"{kernel}, n={200 * clients}"
    return Case("ntk_fl_round", name, {"fedntk": work}, cuda=True, data=True, **often)


# ------------------------------------------------------------------ rounds on engines

CLASSES, INPUTS, WIDTH = 10, 784, 100
P = INPUTS * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES


class Enough(Exception):  # noqa: N818 - no error
    """Ends the run."""


def ntk_dfl(**options: Any) -> Case:
    def work(chosen: Any) -> Work:
        found: Facts = {}

        def seconds() -> float:
            found.update(ntk_dfl_round(data_dir=chosen.data_dir, **options))
            return float(found.pop("seconds"))

        return Work(seconds=seconds, facts=lambda: found)

    words = {"kappa": "neighbours {}", "workers": "two workers", "topology": "in clusters"}
    words["evolve_once"] = "`evolve-once`"
    name = ", ".join(words.get(key, f"{key} {{}}").format(own) for key, own in options.items())
    return Case("ntk_dfl", name, {"fedntk": work}, data=True, **ONCE)


def ntk_dfl_round(
    clients: int, kappa: int, data_dir: str, examples: int = 200, workers: int = 1, **options: Any
) -> Facts:
    from fedntk.simulations import Config, run

    found: Facts = {}
    started: list[float] = []

    def on_round(record: Facts) -> None:
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
            method="ntk-dfl", dataset="fashion-mnist", data_dir=data_dir, alpha=0.1,
            partition="client-dirichlet", examples_per_client=examples, num_clients=clients,
            clients_per_round=clients, clients_per_evaluation=0, model="mlp", width=WIDTH,
            loss="cross-entropy", learning_rate=0.01, rounds=3, evaluate_every=3, out=folder,
            ntk_dfl={"degree": kappa, **options},
        )  # fmt: skip
        try:
            run(config, workers=workers, progress=False, on_round=on_round)
        except Exception as error:
            if not isinstance(error.__cause__ or error, Enough):
                raise
    found["process-mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return found | formulas(kappa, found["mean-examples"], once="evolve_once" in options)


def formulas(kappa: int, examples: float, *, once: bool) -> Facts:
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


CLIENTS, PER_ROUND, BATCH, RATE = 100, 10, 10, 0.05
ROUNDS = 3  # of a value, after one that does not count
Mark = Callable[..., None]  # called at the end of a round


def engine(network: str, workers: int) -> Case:
    """One value is the mean of some rounds of a run."""

    def prepare(chosen: Any) -> None:
        from fedntk.simulations.engine.building import load_setup

        setup = load_setup(our_config(network, chosen, chosen.folder))
        x, y = setup.data.train(np.arange(len(setup.data.y_train)))
        arrays = {"x": x.numpy(), "y": y.numpy(), "clients": np.stack(setup.split.clients)}
        for name, array in arrays.items():
            np.save(Path(chosen.folder) / f"{name}.npy", array)

    def work(way: str, chosen: Any) -> Work:
        found: Facts = {}

        def seconds() -> float:
            marks: list[tuple[float, float]] = []
            facts: list[float] = []

            def mark(in_round: float = 0.0) -> None:
                marks.append((time.perf_counter(), time.process_time()))
                facts.append(in_round)

            CONTENDERS[way](network, workers, chosen, mark)
            (start, cpu), (end, cpu_end) = marks[0], marks[ROUNDS]  # the first does not count
            found["cpu-seconds"] = (cpu_end - cpu) / ROUNDS
            if way == "fedntk":
                found["in-round"] = statistics.median(facts[1:])
            return (end - start) / ROUNDS

        return Work(seconds=seconds, facts=lambda: found)

    made = {way: functools.partial(work, way) for way in CONTENDERS}
    python = {way: str(ROOT / f"build/peers/{way}/bin/python") for way in ("blazefl", "pfllib")}
    return Case(
        "engine", f"{network}, {workers} workers", made, "bare", 1, values=1, data=True,
        prepare=prepare, pythons=python,
    )  # fmt: skip


def examples(folder: str) -> tuple[Tensor, Tensor, np.ndarray]:
    x, y = (torch.from_numpy(np.load(Path(folder) / f"{name}.npy")) for name in "xy")
    return x, y, np.load(Path(folder) / "clients.npy")


def bare(network: str, workers: int, chosen: Any, mark: Mark) -> None:
    x, y, clients = examples(chosen.folder)
    torch.manual_seed(0)
    model = NETWORKS[network][0]()
    generator, drawn = torch.Generator().manual_seed(0), np.random.default_rng(0)
    shards = [(x[rows], y[rows]) for rows in clients]
    weights = copy.deepcopy(model.state_dict())
    for _ in range(ROUNDS + 1):
        sums = {name: torch.zeros_like(w) for name, w in weights.items()}
        for k in drawn.choice(CLIENTS, PER_ROUND, replace=False):
            model.load_state_dict(weights)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            shard_x, shard_y = shards[k]
            for batch in torch.randperm(len(shard_x), generator=generator).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(shard_x[batch]), shard_y[batch]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                sums[name] += tensor / PER_ROUND
        weights = sums
        mark()


def our_config(network: str, chosen: Any, out: str) -> Any:
    """Return the configuration of fedntk; one test example, as no test is to be timed."""
    from fedntk.simulations import Config

    return Config(
        method="fedavg", dataset="fashion-mnist", data_dir=str(Path(chosen.data_dir).resolve()),
        partition="iid", num_clients=CLIENTS, clients_per_round=PER_ROUND, clients_per_evaluation=0,
        test_examples=1, model={"mlp-100": "mlp"}.get(network, network), batch_size=BATCH,
        learning_rate=RATE, rounds=ROUNDS + 1, device="cpu", out=out,
    )  # fmt: skip


def fedntk(network: str, workers: int, chosen: Any, mark: Mark) -> None:
    from fedntk.simulations import run

    with tempfile.TemporaryDirectory() as out:
        config = our_config(network, chosen, out)
        run(config, workers=workers, progress=False, on_round=lambda r: mark(r["seconds"]))


def flower_ray(network: str, workers: int, chosen: Any, mark: Mark) -> None:
    options = {
        "network": network, "examples": chosen.folder, "batch-size": BATCH, "rounds": ROUNDS + 1,
        "learning-rate": RATE, "num-clients": CLIENTS, "clients-per-round": PER_ROUND,
    }  # fmt: skip
    peers, here = (str(ROOT / "benchmarks" / name) for name in ("peers", ""))
    os.environ |= {"STOCK": json.dumps(options), "PYTHONPATH": f"{peers}:{here}"}
    sys.path.insert(0, peers)
    import stock
    from flwr.simulation import run_simulation

    stock.after_round.append(lambda number: mark() if number else None)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        stock.server, stock.client, num_supernodes=CLIENTS,
        backend_config={"init_args": {"num_cpus": workers}, "client_resources": resources},
    )  # fmt: skip


def blazefl(network: str, workers: int, chosen: Any, mark: Mark) -> None:
    from blazefl.contrib import fedavg
    from torch.utils.data import DataLoader, TensorDataset

    x, y, clients = examples(chosen.folder)
    shards = [TensorDataset(x[rows], y[rows]) for rows in clients]

    def loader(type_: Any, cid: int, batch_size: int, generator: torch.Generator) -> Any:
        return DataLoader(shards[cid], batch_size, shuffle=True, generator=generator)

    data = SimpleNamespace(get_dataset=lambda type_, cid: shards[cid], get_dataloader=loader)
    selector = SimpleNamespace(select_model=lambda name: NETWORKS[name][0]())
    common = {
        "model_selector": selector, "model_name": network, "dataset": data,
        "num_clients": CLIENTS, "device": "cpu", "batch_size": BATCH, "seed": 0,
    }  # fmt: skip
    handler = fedavg.FedAvgBaseServerHandler(
        global_round=ROUNDS + 1, sample_ratio=PER_ROUND / CLIENTS, **common
    )
    common |= {"epochs": 1, "lr": RATE}
    if workers == 1:
        trainer = fedavg.FedAvgBaseClientTrainer(**common)
    else:
        trainer = fedavg.FedAvgThreadPoolClientTrainer(num_parallels=workers, **common)
    for _ in range(ROUNDS + 1):
        sampled = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), sampled)
        for package in trainer.uplink_package():
            handler.load(package)
        mark()


def pfllib(network: str, workers: int, chosen: Any, mark: Mark) -> None:
    """PFLlib's FedAvg, its own evaluation left out."""
    torch.set_num_threads(workers)
    system = Path(chosen.pfllib).resolve() / "system"
    x, y, clients = examples(chosen.folder)
    for k, rows in enumerate(clients):  # as its own programs for data sets write them
        for part in ("train", "test"):
            folder = system.parent / "dataset" / "engine" / part
            folder.mkdir(parents=True, exist_ok=True)
            data = {"x": x[rows].numpy(), "y": y[rows].numpy()}
            np.savez_compressed(folder / f"{k}.npz", data=data)
    os.chdir(system)
    sys.path.insert(0, str(system))
    from flcore.servers.serveravg import FedAvg

    torch.manual_seed(0)
    settings = {
        "model": NETWORKS[network][0](), "device": "cpu", "dataset": "engine",
        "num_classes": 10, "global_rounds": ROUNDS + 1, "local_epochs": 1,
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
    server = FedAvg(SimpleNamespace(**settings | dict.fromkeys(zeros.split(), 0)), 0)
    for _ in range(ROUNDS + 1):
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()
        mark()


CONTENDERS = {
    "bare": bare, "fedntk": fedntk, "blazefl": blazefl, "pfllib": pfllib, "flower-ray": flower_ray,
}  # fmt: skip
VISITS = 100


def many_clients(clients: int, rounds: int = 100) -> Case:
    def work(chosen: Any) -> Work:
        from fedntk.simulations import Config, run

        found: list[float] = []

        def seconds() -> float:
            with tempfile.TemporaryDirectory() as folder:
                config = Config(
                    method="fedavg", dataset="fashion-mnist", data_dir=chosen.data_dir,
                    partition="iid", model="mlp", width=10, batch_size=2000, num_clients=clients,
                    clients_per_round=VISITS, clients_per_evaluation=0, test_examples=1,
                    rounds=rounds, out=folder,
                )  # fmt: skip
                run(config, progress=False, on_round=lambda r: found.append(r["seconds"]))
            return statistics.median(found)

        def facts() -> Facts:
            tenth = max(1, rounds // 10)
            first, last = (
                1e3 * statistics.median(some) / VISITS
                for some in (found[1 : tenth + 1], found[-tenth:])
            )
            return {"rounds": rounds, "first-ms": first, "last-ms": last}

        return Work(seconds=seconds, facts=facts)

    return Case("many_clients", f"{clients:,} clients", {"fedntk": work}, "", 1, data=True, **ONCE)


# ------------------------------------------------------------------ start-up

COMMAND = str(Path(sys.executable).parent / "fedntk")
BASE = "import torch, flwr"
PROGRAMS = {
    "fedntk --version": [COMMAND, "--version"],
    "fedntk --help": [COMMAND, "--help"],
    "fedntk run, three rounds of FedAvg": [
        *(COMMAND, "run", "--set", "method=fedavg", "--set", "train_examples=130"),
        *("--set", "num_clients=5", "--set", "rounds=3"),
    ],
}
PROGRAMS |= {
    code: [sys.executable, "-c", code]
    for code in ("pass", BASE, "import fedntk.strategies", "from fedntk.simulations import run")
}


def startup() -> Case:
    def work(program: str, chosen: Any) -> Work:
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        cpu: list[float] = []

        def spent() -> float:
            own = resource.getrusage(resource.RUSAGE_CHILDREN)
            return own.ru_utime + own.ru_stime

        def start() -> None:
            before = spent()
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(  # noqa: S603 - our own programs
                    PROGRAMS[program], cwd=folder, env=environment, check=True, capture_output=True
                )
            cpu.append(spent() - before)

        return Work(start, facts=lambda: {"cpu-seconds": statistics.median(cpu[1:])})

    made = {program: functools.partial(work, program) for program in PROGRAMS}
    return Case("startup", "programs", made, BASE, 1, turns=3)


def cases() -> list[Case]:
    """Return all cases with ways that are timed."""
    both = {"mlp-100": (50, 100, 200, 400), "simple-cnn": (50, 100, 200), "resnet18-gn": (4, 8)}
    single = {"mlp-100": (1000, 2000, 5000, 10_000, 20_000), "simple-cnn": (1000, 2000)}
    single |= {"resnet18-gn": (32, 64)}
    found = [kernel(net, n, "torch.func", **FEW) for net, ns in both.items() for n in ns]
    found += [kernel(net, n, **ONCE) for net, ns in single.items() for n in ns]
    peers = {"mlp-100": (200, 400, 1000, 2000), "simple-cnn": (32, 100)}
    found += [kernel_peers(net, n, t) for t in (1, 2) for net, ns in peers.items() for n in ns]
    found += [
        tangent_features("simple-cnn", 100_000, 100, "loop", "subsample"),
        tangent_features("simple-cnn", 100_000, 1000, "floor", "subsample"),
        tangent_features("simple-cnn", 1000, 100, "loop", "subsample", "projection"),
        tangent_features("simple-cnn", 4000, 1000, "sketch"),
        tangent_features("resnet18-gn", 100_000, 32, "loop", "floor", "subsample"),
        tangent_features("resnet18-gn", 4000, 32, "sketch"),
    ]
    found += [gradient_norms(32), gradient_norms(128)]
    found += [features("fashion-mnist"), features("CIFAR-10, JPEG subset")]
    found += [ntk_fl_round(c, kind) for kind in ("mean", "full") for c in (5, 20, 50, 100)]
    found += [ntk_fl_round(5, "mean, unbuilt")]
    found += [ntk_dfl(clients=100, kappa=kappa) for kappa in (2, 5, 10)]
    found += [ntk_dfl(clients=clients, kappa=5) for clients in (200, 300)]
    found += [ntk_dfl(clients=300, kappa=5, workers=2)]
    found += [ntk_dfl(clients=100, kappa=5, tolerance=value) for value in (1e-4, 1e-2)]
    clusters = {"clients": 300, "kappa": 5, "topology": "clustered"}
    found += [ntk_dfl(**clusters), ntk_dfl(**clusters, evolve_once=True)]
    found += [engine(net, workers) for net in ("mlp-100", "simple-cnn") for workers in (1, 2)]
    return [*found, many_clients(1000), many_clients(5000), startup()]
