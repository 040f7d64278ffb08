"""Accuracy against bytes sent up, for the methods that solve for the last layer in closed form.

Features are p cosines of scattering coefficients, which nobody trains. 100 clients, Dirichlet 0.1.
DeepAFL has as many random features in a block as there are cosines, and up to five blocks. Ridges
are chosen by accuracy on one training image in six (for the blocks: by that of the first block);
then all training images are fitted. Test images only measure.

    python benchmarks/closed_form_bytes.py --data-dir FOLDER --dataset fashion-mnist|cifar10-jpeg
        --cache FOLDER [--features 500,1000,2000] [--deep 500,1000] [--seed 0]
    python benchmarks/closed_form_bytes.py --draw

The cache keeps scattering coefficients from one call to the next. Each row of
the .csv is one method with its bytes up, of all clients and exchanges together.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import RESULTS, keep_rows, parse_options
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, with_residual_features
from fedntk.ntk.features.layers import FourierFeatures
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup
from fedntk.strategies import AFL, DeepAFL, Fed3R, FedCOF, FedNCM

KEYS = ["dataset", "seed", "method", "features", "layers"]
RIDGES = tuple(10.0**k for k in range(-6, 1))
BLOCK_RIDGES = (1e-3, 1e-2, 1e-1)
SHRINKAGES = tuple(10.0**k for k in range(-4, 3))
BANDWIDTH = 1.6
LAYERS = 5
COLOURS = {"FedNCM": "#888888", "FedCOF": "#2a7f3f", "AFL": "#1f5fa8", "Fed3R": "#d08a00"}


class Problem:
    """One data set, its split, and its features."""

    def __init__(self, config: Config, cache: Path) -> None:
        setup = load_setup(config)
        own = setup.split.clients
        every = np.sort(np.concatenate(own))
        held = np.zeros(len(setup.data.y_train), bool)
        drawn = np.random.default_rng(config.seed).choice(every, len(every) // 6, replace=False)
        held[drawn] = True
        self.classes, self.seed = setup.data.num_classes, config.seed
        self.sizes = list(map(len, own))
        self.parts = {
            "fitting": [ids[~held[ids]] for ids in own if (~held[ids]).any()],
            "validation": [ids[held[ids]] for ids in own if held[ids].any()],
            "all": own,
        }
        name = str(config.dataset).rpartition("/")[2]
        cache.mkdir(parents=True, exist_ok=True)
        extract = FeatureMap("last-layer").extractor(setup.network)
        train, test = setup.data.train(np.arange(len(held))), setup.data.test()
        self.labels, self.test_labels = train[1], test[1]
        self.raw, self.test_raw = (
            kept(cache / f"{name}-{part}.npy", x, extract)
            for part, (x, _) in {"train": train, "test": test}.items()
        )

    def use(self, p: int) -> None:
        """Make p cosines of each image."""
        cosines = FourierFeatures(self.raw.shape[1], p, self.seed, BANDWIDTH)
        self.z, self.test_z = (
            torch.cat([cosines(part) for part in raw.split(1000)])
            for raw in (self.raw, self.test_raw)
        )

    def sums(self, part: str, extend: nn.Module | None = None, layer: int = 0) -> FeatureStatistics:
        """Add up a part's features, or those that a block is given beside its random ones."""
        ids = np.concatenate(self.parts[part])

        def chunks() -> Iterator[Tensor]:
            for own in np.array_split(ids, max(1, len(ids) // 1000)):
                z = self.z[own]
                yield z if extend is None else extend.beside(phi(extend, z), layer)

        return FeatureStatistics.of(chunks(), self.labels[ids], self.classes)

    def prototypes(self, part: str) -> list[Prototypes]:
        """Return each client's class means."""
        return [
            Prototypes.of(lambda z: z, self.z[ids], self.labels[ids], self.classes)
            for ids in self.parts[part]
        ]

    def accuracy(self, layer: tuple[np.ndarray, np.ndarray], part: str, extend=None) -> float:
        """Return the share of a part's images, or of the test images, that a layer gets right."""
        ids = None if part == "test" else np.concatenate(self.parts[part])
        z = self.test_z if ids is None else self.z[ids]
        labels = self.test_labels if ids is None else self.labels[ids]
        z = z if extend is None else torch.cat([phi(extend, own) for own in z.split(1000)])
        scores = z.double() @ torch.from_numpy(layer[0]).T + torch.from_numpy(layer[1])
        return float((scores.argmax(1) == labels).double().mean())

    def bytes_of(self, width: int) -> int:
        """Count what all clients send up in one exchange of sums, as their payload's page says."""
        c = self.classes
        own = (min(4 * width * (width + 1), 8 * n * width) for n in self.sizes)
        return sum(own) + len(self.sizes) * (8 * width * c + 8 * c)


def kept(path: Path, x: Tensor, extract) -> Tensor:
    """Load features that an earlier call has kept, or make and keep them."""
    if not path.exists():
        np.save(path, torch.cat([extract(part) for part in x.split(1000)]).numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


@torch.no_grad()
def phi(blocks: nn.Module, z: Tensor) -> Tensor:
    return blocks(z)


def best(fit, choices, problem: Problem):
    """Return the choice whose layer is right on most validation images, ValueErrors left out."""
    scores = {}
    for choice in choices:
        try:
            scores[choice] = problem.accuracy(fit(choice), "validation")
        except (ValueError, ArithmeticError):  # too small a ridge
            continue
    return max(scores, key=scores.__getitem__)


def shallow(problem: Problem, p: int) -> list[dict[str, object]]:
    head, rows = nn.Linear(p, problem.classes), []
    means = {part: problem.prototypes(part) for part in ("fitting", "all")}
    sums = {part: problem.sums(part) for part in ("fitting", "validation")}
    sums["all"] = sums["fitting"] + sums["validation"]
    up = sum(sum(a.nbytes for a in own.to_arrays().values()) for own in means["all"])

    def add(method: str, make, sent, choices, size: int) -> None:
        choice = best(lambda c: make(c).last_layer(sent["fitting"]), choices, problem)
        accuracy = problem.accuracy(make(choice).last_layer(sent["all"]), "test")
        row = {"method": method, "layers": 0, "ridge": choice, "accuracy": accuracy}
        rows.append(row | {"bytes": size})

    grams = {part: [own] for part, own in sums.items()}
    add("FedNCM", lambda _: FedNCM(network=head), means, [np.nan], up)
    add("FedCOF", lambda c: FedCOF(network=head, shrinkage=c), means, SHRINKAGES, up)
    add("AFL", lambda c: AFL(network=head, ridge=c), grams, RIDGES, problem.bytes_of(p))
    add("Fed3R", lambda c: Fed3R(network=head, ridge=c), grams, RIDGES, problem.bytes_of(p))
    return rows


def deep(problem: Problem, p: int) -> list[dict[str, object]]:
    """Measure DeepAFL after each of its exchanges; layer 0 is what the first one gives as well."""
    network = with_residual_features(nn.Linear(p, problem.classes), LAYERS, p, problem.seed)
    blocks = network[0]

    def made(ridge: float, block_ridge: float) -> DeepAFL:
        return DeepAFL(network=network, ridge=ridge, block_ridge=block_ridge)

    def layer_of(own: DeepAFL, sums: FeatureStatistics, layer: int):
        own.num_solved = layer
        arrays = own.with_block(ArrayRecord(network.state_dict()), [sums])
        network.load_state_dict(arrays.to_torch_state_dict())
        return tuple(own.detach().double().numpy() for own in network[1].parameters())

    fitting, validation = (problem.sums(part, blocks) for part in ("fitting", "validation"))
    scores = {}
    for choice in ((r, b) for r in RIDGES if 1e-5 < r < 1 for b in BLOCK_RIDGES):
        found = layer_of(made(*choice), fitting, 0)
        scores[choice] = problem.accuracy(found, "validation", blocks)
    choice = max(scores, key=scores.__getitem__)
    own, total, rows, size = made(*choice), fitting + validation, [], problem.bytes_of(2 * p)
    blocks.omegas[0].data.zero_()
    first = own.last_layer([total.mapped(np.eye(2 * p, p))])
    for layer in range(LAYERS + 1):
        if layer:
            sums = total if layer == 1 else problem.sums("all", blocks, layer - 1)
            first = layer_of(own, sums, layer - 1)
        accuracy = problem.accuracy(first, "test", blocks)
        row = {"method": "DeepAFL", "layers": layer, "accuracy": accuracy}
        row |= dict(zip(("ridge", "block_ridge"), choice, strict=True))
        rows.append(row | {"bytes": size * layer or problem.bytes_of(p)})
        print(rows[-1], flush=True)
    return rows


def draw(table: pd.DataFrame) -> None:
    import matplotlib.pyplot as plt

    titles = {
        "fashion-mnist": "Fashion-MNIST, 60,000 images",
        "cifar10-jpeg": "CIFAR-10, 10,000 images as JPEG",
    }
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.0), constrained_layout=True)
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        part = table[table.dataset == name].assign(mb=lambda t: t.bytes / 1e6 / 100)
        for method, colour in COLOURS.items():
            own = part[part.method == method].sort_values("features")
            style = "--" if method == "Fed3R" else "-"
            panel.plot(
                own.mb, 100 * own.accuracy, style, marker="o", ms=4, color=colour, label=method
            )
        blocks = part[(part.method == "DeepAFL") & (part.layers > 0)]
        for (p, own), marker in zip(blocks.groupby("features"), "s^D", strict=False):
            panel.plot(
                own.mb, 100 * own.accuracy, marker=marker, ms=4, color="#b02a5b",
                label=f"DeepAFL, p = m = {p:,}, 1 to {LAYERS} layers",
            )  # fmt: skip
        panel.set(title=title, xscale="log", xlabel="MB up, a client's mean")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(fontsize=8, loc="lower right")
    figure.savefig(RESULTS / "closed_form_bytes.png", dpi=130)


def main() -> None:
    options = parse_options(
        __doc__, data_dir="", dataset="fashion-mnist", cache="runs/closed-form-bytes",
        features=(500, 1000, 2000), deep=(500, 1000), seed=0, draw=False,
    )  # fmt: skip
    if options.draw:
        draw(pd.read_csv(RESULTS / "closed_form_bytes.csv"))
        return
    name, folder = options.dataset, options.data_dir
    dataset = f"hf:{folder}/CIFAR10-jpeg" if name == "cifar10-jpeg" else name
    config = Config(
        method="afl", dataset=dataset, data_dir=folder, model="scattering", standardise=False,
        num_clients=100, partition="dirichlet", alpha=0.1, seed=options.seed,
    )  # fmt: skip
    problem = Problem(config, Path(options.cache))
    for p in sorted({*options.features, *options.deep}):
        start = time.perf_counter()
        problem.use(p)
        rows = shallow(problem, p) if p in options.features else []
        rows += deep(problem, p) if p in options.deep else []
        new = pd.DataFrame(rows).assign(dataset=name, seed=options.seed, features=p)
        threads = {"threads": torch.get_num_threads()}
        keep_rows("closed_form_bytes", new.to_dict("records"), KEYS, threads)
        print(new.to_string(), f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
