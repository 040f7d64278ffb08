"""One array under two names learns what the same array under one name learns."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from fedntk.simulations import Config, ConfigError, load_model, load_predictor, run
from fedntk.simulations.methods import own_methods
from fedntk.simulations.models import build_model

from .outcomes import measured
from .settings import tiny

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)


class Second(nn.Module):
    """A layer with a bias; its weights are another's."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))


class Net(nn.Module):
    """Uses one matrix twice, which is an array of both layers if it is `tied`; one BatchNorm."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second, self.head = nn.Linear(6, 6) if tied else Second(), nn.Linear(6, 3)
        if tied:
            self.second.weight, self.same_norm = self.first.weight, self.norm

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = nn.functional.linear(hidden, self.first.weight, self.second.bias)
        return self.head(torch.relu(hidden))


def network(*, tied: bool) -> Net:
    made, generator = Net(tied=tied), torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return made


def untied(name: str) -> str:
    """Return the name of an array's only place in the network that is not tied."""
    return name.replace("second.weight", "first.weight").replace("same_norm.", "norm.")


@pytest.mark.parametrize("method", sorted(own_methods()))
def test_a_tied_network_learns_the_bits_of_one_with_a_shared_array(method, tmp_path):
    """All names hold the same numbers, in what is learned and in what is loaded.

    Distances between clients count an array under each of its names; so do the first weights that
    Fed-ensemble draws for each model, which then differ from those of the other network.
    """
    found = {}
    for tied in (False, True):
        folder, model = tmp_path / str(tied), network(tied=tied)
        done = run(tiny(method), data=(X, Y), model=model, out=folder, progress=False)
        rounds = measured(done, "seconds|memory|bytes|deviation").to_csv()
        found[tied] = load_model(folder), rounds, load_predictor(folder, client=0).predict(X)
    (plain, rounds, scores), (model, tied_rounds, tied_scores) = found[False], found[True]
    assert {untied(name) for name in model} == plain.keys()
    assert any(untied(name) != name for name in model)
    for name, array in model.items():
        np.testing.assert_array_equal(array, model[untied(name)], err_msg=name)
    if method != "fed-ensemble":
        assert tied_rounds == rounds
        assert torch.equal(tied_scores, scores)
        for name, array in plain.items():
            np.testing.assert_array_equal(model[name], array, err_msg=name)


def test_a_file_may_hold_an_array_under_one_of_its_names(tmp_path):
    """As safetensors writes them, which keeps one name of each array."""
    model, path = network(tied=True), tmp_path / "weights.safetensors"
    save_model(model, str(path))
    fresh = Net(tied=True)
    config = Config(model=fresh, weights=str(path))
    built = build_model(config, (6,), 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(built.state_dict()[name], tensor)


def test_two_parameters_over_one_memory_are_refused_before_the_run(tmp_path):
    model = network(tied=False)
    model.head.weight.data = model.first.weight.data[:3]
    for given in (model, lambda *_: model):
        with pytest.raises(ConfigError, match=r"but head\.weight shares memory"):
            run(tiny("fedavg"), data=(X, Y), model=given, out=tmp_path, progress=False)
