"""Table 1 of Yu et al. 2022: accuracy after the last layers of a network were trained anew."""

import numpy as np
import torch
from torch import Tensor, nn

from fedntk.simulations import load_model
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model
from fedntk.simulations.report.results import Run

EPOCHS, RATE, MOMENTUM, BATCH = 20, 0.05, 0.9, 64


def retrained(run: Run) -> dict[int, float]:
    """Retrain as many last layers as the run's name says; return the test accuracy in %."""
    config, data = run.config, load_data(run.config)
    network = build_model(config, data.input_shape, data.num_classes)
    state = load_model(run.folder)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    drawn = build_model(config.replace(seed=config.seed + 1000), data.input_shape, data.num_classes)
    names = [name for name, layer in network.named_children() if [*layer.parameters()]]
    last = names[-int(config.name) :]
    for name in last:
        setattr(network, name, drawn.get_submodule(name))
    x, y = data.train(np.arange(len(data.y_train)))
    _train(network, [network.get_submodule(name) for name in last], x, y, config.seed)
    x_test, y_test = data.test()
    with torch.no_grad():
        scores = torch.cat([network.eval()(part) for part in x_test.split(500)])
    return {-1: 100 * float((scores.argmax(1) == y_test).double().mean())}


def _train(network: nn.Module, layers: list[nn.Module], x: Tensor, y: Tensor, seed: int) -> None:
    network.eval().requires_grad_(False)
    parameters = [p for layer in layers for p in layer.train().parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x), generator=order).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
