"""Neighbours in NTK-DFL (Thompson et al., ICML 2025): the curious and those who lie.

docs/results/privacy.md has what curious neighbours of client 0 rebuild from what they get in round
2, when all weights differ. docs/results/ntk_dfl.md has the hostile ones: 90 times as large is less
than the 100 medians that are refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn

from fedntk.clients import NTKDFLClient, client_app
from fedntk.ntk import JacobianUpload, NetworkPredictor
from fedntk.ntk.payloads.npy import from_npy
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NTKDFL, Topology

from . import Row, grid

VICTIM, THIRD = 0, 3
EDGES = ((0, 1), (0, 2), (0, 3), (3, 4))
EXAMPLES = (60, 50, 40, 30, 20)  # of the five clients
ROUND, IMAGES = 2, 20
STARTS, STEPS = 4, 300  # of L-BFGS for an image
CLIENTS, OFFSETS = 20, {2: (1,), 5: (1, 2, 10)}  # of a client's neighbours, both ways round
LIARS = {2: (1, 19), 5: (1, 2)}
SCALES = {"none": 1.0, "labels": 1.0, "scale 90": 90.0, "scale 1e4": 1e4}
CURIOUS = grid(network=("mlp", "cnn"), curious=(1, 2))
HOSTILE = [
    cell for cell in grid(degree=OFFSETS, hostile=(0, 1, 2), attack=SCALES)
    if (cell["attack"] == "none") == (cell["hostile"] == 0)
]  # fmt: skip
Upload = tuple[JacobianUpload, dict[str, Tensor]]  # rows, and the weights that they are at


def network(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if name == "cnn":
        body = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(*body, nn.Linear(128, 10))
    width = 100 if name == "mlp" else 50
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Hostile(NTKDFLClient):
    """Sends Jacobians of wrong labels, and scaled ones."""

    def __init__(self, scale: float, *examples: Any, **options: Any) -> None:
        super().__init__(*examples, **options)
        self.scale = scale

    def step_jacobians(self, message: Any) -> Any:
        """Move labels on, and scale the derivatives by each layer's outputs, its second factor."""
        outgoing, metrics = super().step_jacobians(message)
        changed = {}
        for to, arrays in outgoing.items():
            factors = sorted(name for name in arrays if name.startswith("block-"))[1::2]
            scaled = {name: self.scale * arrays[name] for name in factors}
            changed[to] = {**arrays, **scaled, "targets": np.roll(arrays["targets"], 1, axis=1)}
        return changed, metrics


def federation(
    places: Iterable[Any], name: str, edges: Iterable[tuple[int, int]], rounds: int, seed: int = 0,
    scales: Mapping[int, float] = MappingProxyType({}), kind: Any = LocalGrid, **options: Any,
) -> tuple[Any, NTKDFL, Any]:  # fmt: skip
    """Run clients; those with a scale lie. Return grid, strategy and result."""
    data, model = load_data(Config()), network(name, seed)
    parts = [data.train(some) for some in places]
    strategy = NTKDFL(
        learning_rate=0.1, topology=Topology("own", graph=edges), fraction_evaluate=0.0,
        min_available_nodes=len(parts), **options,
    )  # fmt: skip
    with TemporaryDirectory() as folder:

        def client_fn(context: Context) -> NTKDFLClient:
            k = int(context.node_config["partition-id"])
            client_class = partial(Hostile, scales[k]) if k in scales else NTKDFLClient
            return client_class(network(name, seed), *parts[k], cache=folder, seed=(seed, k))

        grid = kind(client_app(client_fn), len(parts), {})
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
        return grid, strategy, result


class CuriousGrid(LocalGrid):
    """Keeps what clients get in a round, by receiver, step and sender."""

    def _answer(self, message: Message) -> Message:
        config = dict(message.content.config_records.get("config", {}))
        receiver = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        if config.get("server-round") == ROUND and "step" in config:
            for name, record in message.content.array_records.items():
                arrays = {key: from_npy(array.data) for key, array in record.items()}
                place = int(receiver), str(config["step"]), int(name.removeprefix("from-"))
                vars(self).setdefault("got", {})[place] = arrays
        return super()._answer(message)


@cache
def overheard(name: str) -> tuple[Any, Tensor]:
    """Run two rounds; return what was sent, and the truth of client 0's inputs."""
    data = load_data(Config())
    order = np.random.default_rng(0).permutation(len(data.y_train))
    places = np.split(order, np.cumsum(EXAMPLES))[: len(EXAMPLES)]
    options = {"steps": (20.0,), "collect": False, "kind": CuriousGrid}
    grid, *_ = federation(places, name, EDGES, ROUND, **options)
    return grid.got, data.train(places[VICTIM])[0]


def upload_of(got: Any, curious: int) -> Upload:
    """Return what a curious client got from client 0."""
    weights = {n: a for n, a in got[VICTIM, "jacobians", curious].items() if n != "num-examples"}
    rows = {k: a.copy() for k, a in got[curious, "evolve", VICTIM].items() if k != "inputs"}
    shapes = {key: array.shape for key, array in weights.items()}
    tensors = {key: torch.from_numpy(array.copy()) for key, array in weights.items()}
    return JacobianUpload.from_arrays(rows, parameters=shapes, weights=tensors), tensors


def closed_form(uploads: Sequence[Upload], shape: torch.Size) -> Tensor:
    """Read a first linear layer's inputs: weight row over bias row; the mean of all that came."""
    inputs = []
    for upload, _ in uploads:
        dense = upload.jacobian.dense()
        rows, slopes = dense["1.weight"].flatten(1, 2), dense["1.bias"].flatten(1)
        best = slopes.abs().argmax(1)
        each = torch.arange(len(best))
        inputs.append(rows[each, best] / slopes[each, best][:, None])
    return torch.stack(inputs).mean(0).reshape(shape)


def fitted(uploads: Sequence[Upload], shape: torch.Size) -> Tensor:
    """Fit pixels to the convolution's Jacobian and the last layer's inputs, image by image."""
    seen = []
    for upload, weights in uploads:
        model = network("cnn").double()
        model.load_state_dict(weights)
        seen.append((model, {key: t.double() for key, t in upload.jacobian.dense().items()}))

    def distance(i: int, pixels: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for model, rows in seen:
            hidden = model[:4](pixels)
            first = dict(model[0].named_parameters(prefix="0"))
            # the derivatives of output 0 by its own row of weights are that layer's inputs
            total = total + (hidden[0] - rows["4.weight"][i, 0, 0]).square().sum()
            for c, output in enumerate(model[4](hidden)[0]):
                made = torch.autograd.grad(output, [*first.values()], create_graph=True)
                for key, part in zip(first, made, strict=True):
                    total = total + (part - rows[key][i, c]).square().sum()
        return total

    generator, found = torch.Generator().manual_seed(0), []
    for i in range(IMAGES):
        starts = torch.randn(STARTS, *shape[1:], generator=generator, dtype=torch.float64)
        found.append(
            min((descended(partial(distance, i), x[None]) for x in starts), key=itemgetter(0))
        )
    return torch.cat([image for _, image in found])


def descended(distance: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, Tensor]:
    """Bring pixels to the least distance by L-BFGS; return it, and them."""
    fit = torch.optim.LBFGS([x.requires_grad_()], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        fit.zero_grad()
        value = distance(x)
        value.backward(inputs=[x])
        return value

    fit.step(loss)
    return float(loss().detach()), x.detach()


def third_weights(got: Any, curious: Iterable[int]) -> float:
    """Solve eq. (1) for client 3's weights; return the error over that of the average itself."""
    near, seen = [VICTIM, 1, 2, THIRD], [VICTIM, *curious]
    sent = {j: got[VICTIM if j != VICTIM else 1, "average", j] for j in near}
    number = sum(EXAMPLES[j] for j in near if j not in seen)  # of examples, taken as public
    errors, baseline = 0.0, 0.0
    for name, centre in got[1, "jacobians", VICTIM].items():
        if name != "num-examples":
            total = sum(EXAMPLES[j] for j in near) * centre.astype(np.float64)
            rest = total - sum(EXAMPLES[j] * sent[j][name].astype(np.float64) for j in seen)
            errors += float(((rest / number - sent[THIRD][name]) ** 2).sum())
            baseline += float(((centre - sent[THIRD][name]) ** 2).sum())
    return float(np.sqrt(errors / baseline))


def curious(_: str, network: str, curious: int) -> Iterator[Row]:
    got, x = overheard(network)
    clients = range(1, curious + 1)
    uploads = [upload_of(got, client) for client in clients]
    rebuilt = closed_form(uploads, x.shape) if network == "mlp" else fitted(uploads, x.shape)
    error = (rebuilt[:IMAGES] - x[:IMAGES]).flatten(1).double().square().mean(1).sqrt()
    yield {
        "input-error-median": float(error.median()),
        "input-error-mean": float(error.mean()),
        "labels-in-clear": all(bool((u.targets.sum(1) == 1).all()) for u, _ in uploads),
        "third-weights-error": third_weights(got, clients),
    }


def attacked(degree: int, liars: Sequence[int], attack: str, seed: int, rounds: int) -> Row:
    data = load_data(Config())
    order = np.random.default_rng(seed).permutation(len(data.y_train))[: CLIENTS * 50]
    edges = [(k, (k + offset) % CLIENTS) for k in range(CLIENTS) for offset in OFFSETS[degree]]
    scales, places = dict.fromkeys(liars, SCALES[attack]), np.split(order, CLIENTS)
    _, strategy, result = federation(places, "small", edges, rounds, seed, scales, steps=(200.0,))

    def accuracy(weights: Any) -> float:
        model = network("small")
        predictor = NetworkPredictor.from_arrays(model, weights, loss="cross-entropy")
        return float(predictor.evaluate(*data.test()).accuracy)

    others = [k for k in range(1, CLIENTS) if k not in liars]
    refused = [float(m["parcels-rejected"]) for m in strategy.train_metrics.values()]
    return {
        "client 0": accuracy(strategy.models[0]),
        "other honest clients": float(np.mean([accuracy(strategy.models[k]) for k in others])),
        "mean model": accuracy({name: array.numpy() for name, array in result.arrays.items()}),
        "parcels refused a round": float(np.mean(refused)),
    }


def hostile(_: str, degree: int, hostile: int, attack: str, rounds: int = 10) -> Iterator[Row]:
    found = [attacked(degree, LIARS[degree][:hostile], attack, seed, rounds) for seed in range(3)]
    yield {key: round(float(np.mean([row[key] for row in found])), 4) for key in found[0]}
