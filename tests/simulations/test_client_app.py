"""The Flower app's clients in a deployment: nodes with examples of their own, or with no number."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedntk.clients import PrivacyLedger
from fedntk.clients.core.privacy_ledger import Release
from fedntk.clients.core.secure_sum import SumRequest
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import load_data, load_own
from fedntk.simulations.engine.building import load_setup, make_client, make_strategy
from fedntk.simulations.engine.client_app import _masks, client_fn
from fedntk.simulations.engine.engines import LocalGrid, MeteredGrid
from fedntk.strategies import NoUsableReply

from ..conftest import refused as refused_by
from ..strategies.federation import bits
from .outcomes import grid_of, refused

CONFIG = Config(
    method="fedavg", num_clients=3, clients_per_round=3, clients_per_evaluation=3, rounds=2
)
NODES = (5, 2**63 + 7, 2**64 - 2)  # Flower's ids are any numbers of 64 bits


def grid(node_configs: list[dict[str, Any]], ids=NODES) -> LocalGrid:
    made = grid_of(CONFIG)
    made.contexts = dict(zip(ids, made.contexts.values(), strict=True))
    for (node_id, context), own in zip(made.contexts.items(), node_configs, strict=True):
        context.node_id, context.node_config = node_id, own
    return made


def learned(of: LocalGrid) -> dict[str, bytes]:
    setup = load_setup(CONFIG)
    strategy = make_strategy(setup)
    initial = ArrayRecord(dict(setup.network.state_dict()))
    result = strategy.start(grid=MeteredGrid(of), initial_arrays=initial, num_rounds=2)
    assert result.train_metrics_clientapp[1]["replies-rejected"] == 0
    return bits({name: array.numpy() for name, array in result.arrays.items()})


def raw(partition: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a partition's examples, as stored."""
    setup = load_setup(CONFIG)
    own = setup.split.clients[partition]
    return setup.data.x_train[own], setup.data.y_train[own]


def save(file: Path, **arrays: Any) -> str:
    np.savez(file, **arrays)
    return str(file)


def test_a_node_with_its_own_examples_trains_on_these(tmp_path):
    """A folder with a partition's examples, in their order, makes the bits of the partition."""
    x, y = raw(1)
    nodes: list[dict[str, Any]] = [{"partition-id": i} for i in range(3)]
    expected = learned(grid(nodes))
    save(tmp_path / "examples.npz", x=x, y=y)
    nodes[1]["data-path"] = str(tmp_path)
    assert learned(grid(nodes)) == expected
    save(tmp_path / "examples.npz", x=x[: len(x) // 2], y=y[: len(y) // 2])
    assert learned(grid(nodes)) != expected
    save(tmp_path / "other.npz", x=x, y=y)
    refused("npz file, or a folder with one", load_own, str(tmp_path), load_data(CONFIG), 1437)


def test_a_node_reads_its_table_in_its_own_way_and_says_once_what_it_read(tmp_path, caplog):
    """A run with two rounds: one line a node, with the shares of its classes, in its own log."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 2)), columns=["a", "b"])
    frame["label"] = np.array(["no", "yes"])[(frame.a > 0).astype(int)]
    frame.to_csv(tmp_path / "all.csv", index=False)
    config = CONFIG.replace(dataset=f"csv:{tmp_path}/all.csv", partition="iid", evaluate_every=2)
    of, setup = grid_of(config), load_setup(config)
    own = frame[:8].rename(columns={"label": "ok"})
    own.to_csv(tmp_path / "own.csv", index=False, sep=";", decimal=",")
    node = {"data-path": f"{tmp_path}/own.csv", "target": "ok", "separator": "semicolon"}
    of.contexts[1].node_config |= node | {"decimal": "comma"}
    initial = ArrayRecord(dict(setup.network.state_dict()))
    caplog.set_level("INFO", "flwr")
    make_strategy(setup).start(grid=MeteredGrid(of), initial_arrays=initial, num_rounds=2)
    yes = (own.ok == "yes").mean()
    said = f"own.csv: rows 8, columns 2, classes no {1 - yes:.1%}, yes {yes:.1%}"
    assert caplog.text.count("data-path") == caplog.text.count(said) == 1
    of.contexts[1].node_config["separator"] = ";"
    refused("^node config: separator: expected", client_fn, of.contexts[1])


def test_a_node_without_a_number_goes_by_its_id(tmp_path):
    """It is trained in each round, and its id seeds what it draws."""
    x, y = raw(2)
    path = save(tmp_path / "own.npz", x=x, y=y)
    configs = [{"partition-id": 0}, {"partition-id": 1}, {"data-path": path}]
    ids = [(5, 2**63 + 7, last) for last in (2**64 - 2, 2**64 - 2, 2**64 - 3)]
    first, same, other = (learned(grid(configs, ids=own)) for own in ids)
    assert first == same != other


@pytest.mark.parametrize("test", [True, False])
def test_a_node_evaluates_on_test_examples_of_its_own(tmp_path, test):
    """Without such, on its training examples."""
    (x, y), setup = raw(0), load_setup(CONFIG)
    arrays = {"x_test": x[:3], "y_test": y[:3]} if test else {}
    own = load_own(save(tmp_path / "own.npz", x=x, y=y, **arrays), setup.data, 1437)
    client = make_client(setup, 0, {}, own)
    assert client.evaluate(client.get_parameters({}), {})[1] == (3 if test else len(y))


def test_a_node_that_names_no_examples_is_refused_in_one_line():
    of = grid([{"partition-id": 0}, {"partition-id": 1}, {}])
    weights = ArrayRecord(dict(load_setup(CONFIG).network.state_dict()))
    message = Message(RecordDict({"arrays": weights}), NODES[2], MessageType.TRAIN)
    (reply,) = of.send_and_receive([message])
    assert all(word in reply.error.reason for word in ("partition-id", "data-path"))
    for number in (-1, 3):
        with pytest.raises(ConfigError, match=rf"partition-id: expected 0 \.\.\. 2, got {number}"):
            make_client(load_setup(CONFIG), number, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: {"x": x}, "must hold x and y"),
        (lambda x, y: {"x": x[..., :4], "y": y}, r"shape \(n, 1, 8, 8\), got \(453, 1, 8, 4\)"),
        (lambda x, y: {"x": x, "y": y + 9}, "expected the classes 0, .*, 9, got 10"),
        (lambda x, y: {"x": x[:0], "y": y[:0]}, r"1 \.\.\. 1437 examples, got 0"),
    ],
)
def test_examples_that_do_not_fit_are_refused(tmp_path, change, message):
    """By the run's data set: 8 x 8 digits of ten classes, 1,437 for training."""
    x, y = raw(1)
    path = save(tmp_path / "own.npz", **change(x, y))
    with pytest.raises(ConfigError, match=message) as caught:
        load_own(path, load_data(CONFIG), 1437)
    assert str(caught.value).startswith("data-path: ")
    assert make_strategy(load_setup(CONFIG.replace(max_examples=2000))).max_examples == 2000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"projection": 20}, "projection"),
        ({"method": "cp-ntk-fl", "cp_ntk_fl": {"shuffle": True}}, "cp-ntk-fl.shuffle"),
    ],
)
def test_own_examples_are_not_left_to_protection_that_is_none(tmp_path, settings, named):
    """Keys of the app come from the run's seed, which everyone knows."""
    config = CONFIG.replace(**settings)
    setup, (x, y) = load_setup(config), raw(0)
    own = load_own(save(tmp_path / "own.npz", x=x, y=y), setup.data, 1437)
    refused(f"^{named}: .*protect nothing", make_client, setup, 0, {}, own)
    make_client(setup, 0, {})


ASKED = {"noise": {"epsilon": 2.0}, "sums": {"auto_ridge": False, "validation_share": 0.0}}
SUMS = {
    "method": "one-exchange", "clients_per_evaluation": 0, "one_exchange": ASKED, "secure": True,
    "standardise": False, "public": "moments",
}  # fmt: skip


def of_owner(tmp_path, settings, **said):
    """The client, and the mod of weights, of a node with its own examples."""
    config = CONFIG.replace(**settings)
    x, y = raw(0)
    of = grid_of(config)
    context = next(iter(of.contexts.values()))
    context.node_id, context.node_config = 7, {"data-path": save(tmp_path / "x.npz", x=x, y=y)}
    context.node_config |= {f"privacy-{key.replace('_', '-')}": own for key, own in said.items()}
    return client_fn(context), _masks(config, tuple(context.node_config.items()))


def test_a_run_with_noise_says_nothing_of_its_training_examples():
    assert load_setup(CONFIG.replace(**SUMS)).describe_data() == "data digits: as they are"


@pytest.mark.parametrize("settings", [SUMS, {"secure": True}])
def test_the_run_neither_sets_nor_loosens_what_an_owner_allows(tmp_path, settings):
    """Without a ledger nothing that is masked or has noise leaves a node with its own examples."""
    client, mod = of_owner(tmp_path, settings)
    sender = client.secure if settings is SUMS else mod
    request = SumRequest(SumTask(bits=8), "1", Release("a run"))
    refused_by("privacy-ledger in the node config", sender.answer, "public-key", request, {})
    ledger = PrivacyLedger.create(tmp_path / "x.ledger").path
    said = {"ledger": str(ledger), "epsilon": 1, "fewest_clients": 9, "most_radius": 50}
    client, mod = of_owner(tmp_path, settings, **said)
    sender = client.secure if settings is SUMS else mod
    assert (sender.only_masked, sender.allow_repeats) == (True, False)
    assert (sender.privacy.epsilon, sender.privacy.fewest_clients) == (1.0, 9)


def test_a_nodes_ledger_knows_its_examples_however_a_run_prepares_them(tmp_path):
    ledger = PrivacyLedger.create(tmp_path / "x.ledger").path
    task = SumTask(step="statistics", bits=8, epsilon=1.0)
    for standardise, run in ((True, "a"), (False, "b")):
        said = {"ledger": str(ledger), "epsilon": 2.0, "delta": 2e-5}
        client, _ = of_owner(tmp_path, SUMS | {"standardise": standardise}, **said)
        client.secure.reserve(client.sum_request(task, {}), run)
    assert len(PrivacyLedger(ledger).releases()) == 2
    request = client.sum_request(task, {})
    refused_by("delta of .3.0", client.secure.reserve, request, "c")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"ledgr": "a"}, "node config, privacy-.*ledgr"),
        ({"epsilon": 1.0}, "node config, privacy-.*ledger"),
        ({"ledger": "a", "epsilon": -1.0}, "epsilon: expected more than 0"),
        ({"ledger": "a", "allow_repeats": "false"}, "allow_repeats: expected"),
    ],
)
def test_what_a_node_says_wrongly_of_privacy_is_refused(tmp_path, said, message):
    refused_by(message, of_owner, tmp_path, SUMS, **said)


def with_ledgers(folder, of, **said):
    """Give each node of a grid a file with its examples, and a ledger."""
    for k, context in enumerate(of.contexts.values()):
        x, y = raw(k)
        ledger = PrivacyLedger.create(folder / f"{k}.ledger").path
        path = save(folder / f"{k}.npz", x=x, y=y)
        context.node_config = {"data-path": path, "privacy-ledger": str(ledger), **said}
    return of


@pytest.mark.parametrize("secure", [True, False])
def test_nodes_with_ledgers_give_one_noisy_sum_through_the_app(tmp_path, secure):
    """Masked, or to a trusted server; a second run passes the budgets of their owners."""
    config = CONFIG.replace(**SUMS | {"secure": secure, "width": 8, "out": str(tmp_path)})
    said = {"privacy-epsilon": 2.0, "privacy-only-masked": secure}
    setup, of = load_setup(config), with_ledgers(tmp_path, grid_of(config), **said)
    initial = ArrayRecord(dict(setup.network.state_dict()))
    strategy = make_strategy(setup)
    strategy.start(grid=MeteredGrid(of), initial_arrays=initial, num_rounds=1)
    assert strategy.train_metrics[1]["replies-accepted"] == 3
    for k in range(3):
        (release,) = PrivacyLedger(tmp_path / f"{k}.ledger").releases()
        assert (release.epsilon, release.spent) == (2.0, secure)
    again = make_strategy(setup)
    with pytest.raises(NoUsableReply, match="its owner allows"):
        again.start(grid=MeteredGrid(of), initial_arrays=initial, num_rounds=1)


@pytest.mark.parametrize("said", [{}, {"privacy-epsilon": 2.0}, {"privacy-only-masked": False}])
@pytest.mark.parametrize("method", ["cp-ntk-fl", "ntk-fl", "fedavg"])
def test_a_node_with_a_ledger_sends_no_jacobians_and_no_weights(tmp_path, method, said):
    """Neither a budget nor trust in the server is of anything but sums."""
    config = CONFIG.replace(method=method, clients_per_evaluation=0, out=str(tmp_path))
    setup, of = load_setup(config), with_ledgers(tmp_path, grid_of(config), **said)
    initial = ArrayRecord(dict(setup.network.state_dict()))
    with pytest.raises(NoUsableReply, match="sends only masked sums, and was asked for train"):
        make_strategy(setup).start(grid=MeteredGrid(of), initial_arrays=initial, num_rounds=1)


@pytest.mark.parametrize("limited", [True, False])
def test_a_nodes_errors_tell_nothing_of_its_examples(tmp_path, limited, caplog):
    """What does not fit is in the node's own log, with figures and cells."""
    of = with_ledgers(tmp_path, grid_of(CONFIG.replace(**SUMS | {"standardise": True})))
    x, y = raw(0)
    save(tmp_path / "0.npz", x=1e4 * x, y=y)
    context = next(iter(of.contexts.values()))
    if not limited:
        del context.node_config["privacy-ledger"]
    refused("^data-path: the examples do not fit the run's data set; this node's log says why$",
            client_fn, context)  # fmt: skip
    assert "deviations off" in caplog.text
