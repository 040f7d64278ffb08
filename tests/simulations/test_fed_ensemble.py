"""Fed-ensemble in the simulations: the first weights of its models, and what it refuses."""

import pytest
import torch

from fedntk.simulations import Config, ConfigError, run
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.strategies import FedEnsemble


def test_models_can_be_drawn_as_the_networks_layers_draw_them():
    """Torch's are uniform within 1 / sqrt(fan_in) of zero, which normal ones would soon leave."""
    config = Config(
        method="fed-ensemble", model="digits-cnn", width=64, fed_ensemble={"init": "network"}
    )
    setup = load_setup(config)
    strategy = make_strategy(setup)
    assert isinstance(strategy, FedEnsemble)
    assert callable(strategy.init)
    first, *others = map(strategy.init, range(5))
    drawn = [model.state_dict() for model in (first, *others)]
    for name, array in first.state_dict().items():
        if array.ndim < 2:
            continue
        fan_in = array[0].numel()
        for own in drawn:
            assert float(own[name].abs().max()) <= fan_in**-0.5 + 1e-6
        for i, own in enumerate(drawn):
            assert not any(torch.equal(own[name], other[name]) for other in drawn[:i])
    again = strategy.init(1).state_dict()
    assert all(torch.equal(array, again[name]) for name, array in others[0].state_dict().items())


@pytest.mark.parametrize("inner", ["ditto", "d-psgd"])
def test_methods_whose_models_stay_with_the_clients_are_refused(inner, tmp_path):
    own = {"inner": inner, "num_models": 2}
    config = Config(method="fed-ensemble", fed_ensemble=own, rounds=1, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="cannot work within a FedEnsemble"):
        run(config, progress=False)


def test_weights_that_only_one_model_would_begin_with_are_refused():
    with pytest.raises(ConfigError, match="expected none with fed-ensemble"):
        Config(method="fed-ensemble", weights="model.safetensors")
