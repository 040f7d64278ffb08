"""A network that writes over its input learns what the same network out of place learns."""

import numpy as np
import pytest
from torch import Tensor, nn

from fedntk.simulations import run
from fedntk.simulations.methods import own_methods

from .outcomes import bits, measured
from .settings import tiny

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)


class Shifted(nn.Module):
    """Subtracts a number and takes absolute values."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.3).abs_() if self.in_place else x.sub(0.3).abs()


def network(*, in_place: bool) -> nn.Module:
    shifted = Shifted(in_place=in_place)
    return nn.Sequential(shifted, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("method", sorted(own_methods()))
def test_a_network_that_writes_over_its_input_learns_the_same_bits(method, tmp_path):
    """And the caller's arrays, which everything could share, are as they were."""
    config = tiny(method)
    x, found = X.copy(), {}
    first = network(in_place=False)
    for in_place in (False, True):
        model, folder = network(in_place=in_place), tmp_path / str(in_place)
        model.load_state_dict(first.state_dict())
        done = run(config, data=(x, Y), model=model, out=folder, progress=False)
        found[in_place] = bits(folder), measured(done).to_csv()
        np.testing.assert_array_equal(x, X)
    assert found[True] == found[False]
