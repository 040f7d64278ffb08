"""Fed-ensemble in the simulations: the first weights of its models."""

import torch

from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup, make_strategy


def test_models_can_be_drawn_as_the_networks_layers_draw_them():
    """Torch's are uniform within 1 / sqrt(fan_in) of zero, which normal ones would soon leave."""
    own = {"init": "network"}
    config = Config(method="fed-ensemble", model="digits-cnn", width=64, fed_ensemble=own)
    strategy = make_strategy(load_setup(config))
    first, *others, again = (strategy.init(k).state_dict() for k in (0, 1, 2, 3, 4, 1))
    for name, array in first.items():
        assert torch.equal(others[0][name], again[name])
        for own in (first, *others) if array.ndim > 1 else ():
            assert float(own[name].abs().max()) <= array[0].numel() ** -0.5 + 1e-6
            assert sum(torch.equal(own[name], other[name]) for other in (first, *others)) == 1
