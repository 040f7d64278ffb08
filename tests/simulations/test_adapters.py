"""Adapters as a setting of runs: what is sent, on which machines, and tangents in one exchange."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedntk.ntk import with_lora
from fedntk.simulations import Config, delete, load_model, load_predictor, run
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.data.load import load_data
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.models import build_networks

from .outcomes import bits, refused
from .test_deleting import never

pytestmark = pytest.mark.xdist_group("peft")  # which takes seconds to import
SMALL = {
    "dataset": "digits",
    "num_clients": 4,
    "clients_per_round": 4,
    "clients_per_evaluation": 0,
    "partition": "iid",
    "train_examples": 120,
    "test_examples": 60,
    "rounds": 2,
    "learning_rate": 0.1,
}
WIDTH, CLASSES, RANK = 100, 10, 2
LORA = {"adapters": "lora", "adapter_rank": RANK}
NONE = {"adapters": "none", "adapter_rank": 4}
TANGENT = {"adapters": "tangent-lora", "adapter_rank": RANK}
EXCHANGE = {"method": "one-exchange", "rounds": 1}
ENSEMBLE = {"method": "fed-ensemble", "fed_ensemble.num_models": 2, "adapters": "lora"}


@pytest.fixture
def weights(tmp_path):
    """File of a network that was trained before."""
    before = run(SMALL, method="fedavg", seed=1, out=tmp_path / "before", progress=False)
    return before.folder / "model.safetensors"


@pytest.mark.parametrize("kind", ["lora", "ffa-lora"])
def test_only_adapters_and_the_last_layer_are_sent_and_trained(kind, weights, tmp_path):
    options = SMALL | LORA | {"method": "fedavg", "adapters": kind, "weights": str(weights)}
    result = run(options, out=tmp_path / "run", progress=False)
    learned, base = load_model(result.folder), load_model(weights.parent)
    numbers = RANK * (WIDTH + 64 * (kind == "lora")) + CLASSES * (WIDTH + 1)
    assert sum(array.size for array in learned.values()) == numbers
    sent = {name: result.summary[name] for name in ("bytes-up", "bytes-down")}
    plain = run(options | NONE, out=tmp_path / "all", progress=False)
    of_messages = SMALL["rounds"] * SMALL["num_clients"]
    for name, size in sent.items():  # names, shapes and metrics are less than 4 kB a message
        assert 0 <= size - 4 * of_messages * numbers < 4000 * of_messages
        assert size < 0.5 * plain.summary[name]
    predictor = load_predictor(result)
    frozen = predictor.network.frozen_state()
    layer = next(name for name in frozen if name.endswith("base_layer.weight"))
    assert np.array_equal(frozen[layer], base["1.weight"])
    data = load_data(result.config)
    evaluated = predictor.evaluate(data.x_test[:60], data.y_test[:60])
    assert evaluated.accuracy == result.summary["accuracy"]
    again = run(options, out=tmp_path / "again", progress=False)
    assert bits(again.folder) == bits(result.folder)
    # its weights are not for another network's adapters, and others at the place are noticed
    last = result.config.replace(weights=str(result.folder / "model.safetensors"))
    refused("another frozen network", build_networks, last, (1, 8, 8), CLASSES)
    weights.write_bytes((plain.folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="frozen part of the network has changed"):
        load_predictor(result)


def test_a_node_with_other_frozen_weights_is_told_apart():
    """In FFA-LoRA also with another A; what is trained is sent, and may be anything."""
    schemas = {}
    for seed in (0, 1):
        for kind in ("none", "lora", "ffa-lora"):
            how = NONE if kind == "none" else LORA | {"adapters": kind}
            config = Config(**SMALL | how | {"seed": seed}, method="fedavg")
            schemas[kind, seed] = load_setup(config).data.digest
    assert schemas["none", 0] == schemas["none", 1]
    assert len({*schemas.values()}) == 5


def test_features_before_the_adapters_are_those_without_them():
    """The same name in the cache, so that they are computed once for both."""
    config = Config(**SMALL, model="mlp", trained="3", method="fedavg")
    options = {"trained": "1", "model": deep}
    keys = [
        build_networks(config.replace(**options, adapters=kind), (1, 8, 8), CLASSES)[1].key
        for kind in ("none", "lora", "ffa-lora")
    ]
    assert len({*keys}) == 1


def deep(input_shape, num_classes):
    hidden = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.5)
    return nn.Sequential(nn.Flatten(), nn.Sequential(*hidden), nn.Linear(16, num_classes))


@pytest.mark.parametrize("method", ["scaffold", "ntk-fl", "ditto", "fed-ensemble", "tct"])
def test_methods_that_train_weights_train_adapters(method, tmp_path):
    options = SMALL | LORA | {"method": method, "model": deep}
    options |= {"fed-ensemble": {**ENSEMBLE, "fed_ensemble.init": "network"}}.get(method, {})
    options |= {"tct": {"rounds": 4, "tct.bootstrap_rounds": 1}}.get(method, {})
    config = Config(options, out=str(tmp_path / "run"))
    result = run(config, progress=False)
    learned = load_model(result.folder)
    factors = [array for name, array in learned.items() if name.endswith("lora_B.default.weight")]
    assert len(factors) == 2 * (2 if method == "fed-ensemble" else 1)
    assert all(array.any() for array in factors)
    assert not any(name.endswith(("base_layer.weight", "running_mean")) for name in learned)
    data = load_data(config)
    evaluated = load_predictor(result).evaluate(data.x_test[:60], data.y_test[:60])
    assert evaluated.accuracy == result.summary["accuracy"]


def test_one_exchange_solves_in_tangent_features(weights, tmp_path):
    """AFL's ridge against a float64 solution from autograd of the network without adapters."""
    ridge, options = 1.0, SMALL | TANGENT | {"weights": str(weights), "rounds": 1}
    config = Config(options, method="afl", afl={"ridge": ridge}, out=str(tmp_path / "run"))
    result = run(config, progress=False)
    setup = load_setup(result.config)
    assert setup.frozen.shape == (RANK * WIDTH + WIDTH + 1,)
    rows = np.concatenate(setup.split.clients)
    stored, labels = setup.data.train(rows)
    tangent = setup.frozen.network
    head = tangent.network.network[-1]
    (a,) = (p for n, p in tangent.network.named_parameters() if ".lora_A." in n)
    base = {n: torch.from_numpy(array).double() for n, array in load_model(weights.parent).items()}
    inputs = setup.data.inputs(setup.data.x_train[rows], check_ranges=False).double().flatten(1)
    before = inputs @ base["1.weight"].T + base["1.bias"]
    gates = (before > 0) * head.weight.detach().double()  # df / d before
    projected = 8.0 / RANK * inputs @ a.detach().double().T
    of_b = (gates[:, :, None] * projected[:, None, :]).flatten(1)
    z = nn.functional.normalize(torch.cat([of_b, before.relu(), torch.ones(len(rows), 1)], 1))
    torch.testing.assert_close(nn.functional.normalize(stored).double(), z, rtol=0, atol=1e-5)
    targets = nn.functional.one_hot(labels, CLASSES).double()
    # the examples' mean squared norm is 1
    expected = torch.linalg.solve(z.T @ z + ridge * torch.eye(z.shape[1]), z.T @ targets).T
    learned = torch.from_numpy(load_model(result.folder)["1.weight"]).double()
    # features of length 1 are 1e-5 apart, and the system's condition is at most n / ridge + 1
    error = 2e-5 * (len(rows) / ridge + 1)
    torch.testing.assert_close(learned, expected, rtol=0, atol=error * float(expected.norm()))


@pytest.mark.parametrize("secure", [False, True])
def test_masked_sums_and_deleted_rows_leave_the_bits_of_a_run_without_them(
    secure, weights, tmp_path
):
    config = Config(
        SMALL | TANGENT | EXCHANGE, weights=str(weights), one_exchange={"changes": True}
    )
    finished = run(config, out=tmp_path / "run", secure=secure, progress=False)
    for gone in ({}, {2: [0, 3]}):
        for client, rows in gone.items():
            delete(finished, client, rows, progress=False)
        arrays = load_model(finished.folder)
        expected = never(finished.config, gone)
        assert {name: array.tobytes() for name, array in arrays.items()} == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "afl", "adapters": "lora"}, "afl learns only the last layer"),
        ({"method": "one-exchange", "adapters": "ffa-lora"}, "set adapters = tangent-lora"),
        ({"init": "he", "adapters": "lora"}, "init = he would draw adapters anew"),
        ({"projection": 5, "adapters": "lora"}, "projection: adapters are of a network"),
        ({**ENSEMBLE, "fed_ensemble.init": "he"}, "set fed-ensemble.init = network"),
        ({"adapters": "tangent-lora", "attack": "backdoor", "liars": 1}, "attack = backdoor"),
        ({"adapters": "dora"}, "adapters: expected"),
        ({"adapter_rank": 0}, "adapter-rank: expected"),
        ({"adapter_rank": 2}, "adapter-rank goes with adapters = lora.*got 2"),
        ({"adapter_alpha": 2.0}, "adapter-alpha goes with adapters = lora"),
        ({"adapter_targets": "1"}, "adapter-targets goes with adapters = lora"),
        ({"adapter_alpha": 0.0}, "adapter-alpha: expected"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Config(SMALL, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trained": "head"}, "adapters = lora: targets: expected layers to adapt, such as none"),
        ({"model": "linear"}, "adapters = lora: targets: expected layers to adapt, such as none"),
        ({"adapter_targets": "1, fc"}, "such as 1; got fc"),
        ({"adapter_rank": 65}, "rank: expected at most 64 with 1"),
    ],
)
def test_networks_that_cannot_have_adapters_are_refused(options, said):
    refused(said, build_networks, Config(SMALL | LORA | options), (1, 8, 8), CLASSES)


def adapted(input_shape, num_classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, num_classes))
    return with_lora(network, torch.zeros(1, *input_shape), 1)


@pytest.mark.parametrize("method", ["afl", "deep-afl", "one-exchange"])
def test_methods_of_the_last_layer_refuse_networks_with_adapters(method):
    config = Config(SMALL, method=method, model=adapted, rounds=1)
    refused("learns only the last layer", build_networks, config, (1, 8, 8), CLASSES)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LORA, LORA | {"seed": 1}),
        (LORA, LORA | {"adapter_alpha": 2.0}),
        (LORA, LORA | {"adapters": "ffa-lora"}),
        (TANGENT, TANGENT | {"seed": 1}),
        (TANGENT, TANGENT | {"adapter_alpha": 2.0}),
    ],
)
def test_weights_of_other_frozen_ones_are_refused(before, after, tmp_path):
    """Also arrays without what the run wrote beside them, if they are frozen here."""
    config = Config(SMALL | before, method="fedavg", rounds=1, out=str(tmp_path / "run"))
    path = run(config, progress=False).folder / "model.safetensors"
    same = config.replace(weights=str(path))
    network, _ = build_networks(same, (1, 8, 8), CLASSES)
    learned = load_model(path.parent)
    assert all(np.array_equal(t, learned[name]) for name, t in network.state_dict().items())
    other = same.replace(**after)
    refused("another frozen network", build_networks, other, (1, 8, 8), CLASSES)
    if other.adapters == "ffa-lora":
        bare = str(tmp_path / "bare.safetensors")
        save_file({name: torch.from_numpy(array + 1) for name, array in learned.items()}, bare)
        other = other.replace(weights=bare)
        refused("is frozen: expected its own", build_networks, other, (1, 8, 8), CLASSES)
