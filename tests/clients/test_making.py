"""How client_app makes clients: one at a time, each with random numbers of its own."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedntk.clients import LocalSGD, NTKFLClient, SGDClient, client_app
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NTKFL, NoUsableReply, SeededFedAvg

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Augmented(Dataset[tuple[Tensor, int]]):
    """Adds noise from torch's global generator each time that an example is read."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return X[i] + torch.randn(4), int(Y[i])


def net():
    """A user's own network, built anew in each message, whose weights and dropout draw."""
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))


with torch.random.fork_rng(devices=[]):
    torch.default_generator.manual_seed(0)
    WEIGHTS = ArrayRecord(dict(net().state_dict()))


def trained(workers):
    def client_fn(context):
        return SGDClient(net(), Augmented(), sgd=LocalSGD(epochs=3, batch_size=4))

    strategy = SeededFedAvg(fraction_evaluate=0.0)
    with LocalGrid(client_app(client_fn), 12, {}, workers=workers) as grid:
        result = strategy.start(grid, WEIGHTS, num_rounds=2)
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def test_clients_in_threads_do_not_draw_each_others_numbers():
    """client_fn builds a network, which draws from the generator that reading and dropout use."""
    expected = trained(1)
    assert all(trained(4) == expected for _ in range(2))


def test_clients_without_a_seed_draw_numbers_of_their_own():
    """By their ids in the federation, and the same in each exchange of a round."""
    seen = {}

    def client_fn(context):
        class Watching(NTKFLClient):
            def training_examples(self, config):
                x, targets = super().training_examples(config)
                seen.setdefault(int(context.node_config["partition-id"]), []).append(x)
                return x, targets

        return Watching(net(), Augmented())

    strategy = NTKFL(learning_rate=0.1, steps=[20], fraction_evaluate=0.0)
    strategy.start(LocalGrid(client_app(client_fn), 2, {}), WEIGHTS, num_rounds=1)
    for fit, query in seen.values():
        assert torch.equal(fit, query)
    assert not torch.equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize(("seed", "expected"), [(3, (3,)), ((1, 2), (1, 2)), (None, (0,))])
def test_a_seed_may_be_one_number(seed, expected):
    client = SGDClient(nn.Linear(4, 3), X, Y, seed=seed)
    assert client.seed == expected
    client.identify("7")
    assert (client.seed == expected) == (seed is not None)
    with pytest.raises(ValueError, match="seed: expected a whole number of at least 0, or sever"):
        SGDClient(nn.Linear(4, 3), X, Y, seed=(0, -1))


def test_a_client_fn_of_older_tutorials_is_told_what_to_return():
    def client_fn(context):
        return SGDClient(net(), X, Y).to_client()

    strategy = SeededFedAvg(fraction_evaluate=0.0)
    with pytest.raises(NoUsableReply, match=r"return the client itself, without .to_client\(\)"):
        strategy.start(LocalGrid(client_app(client_fn), 2, {}), WEIGHTS, num_rounds=1)
