"""A method is an object with all that the simulations ask; other packages may bring one."""

import inspect
import re
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from fedntk.ntk.options import option
from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.engine.server_app import prepare
from fedntk.simulations.methods import all_methods, own_methods
from fedntk.simulations.methods.method import Method
from fedntk.strategies import SeededFedAvg

from .settings import FEDAVG, SETTINGS


def test_what_other_packages_name_wrongly_is_left_out(monkeypatch, caplog):
    """What they name well is used as the page on adding a method says."""
    named = {
        "missing": ("math:NOTHING", "AttributeError"),
        "number": ("math:pi", "expected an object of a subclass of Method, got 3.14"),
        "twice": ("fedntk.simulations.methods.tct:METHOD", "is a method 'tct' already"),
    }
    entries = [EntryPoint(name, value, "fedntk.methods") for name, (value, _) in named.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    assert all_methods.__wrapped__() == own_methods()
    for said, (name, (value, reason)) in zip(caplog.messages, named.items(), strict=True):
        assert f"method {name} ({value}) is left out: " in said
        assert reason in said


class ToyAvg(SeededFedAvg):
    """FedAvg with one option more."""

    depth: int = option("how deep", default=2, at_least=1, at_most=9)


class Toy(Method):
    name = "toy-avg"
    strategy_class = ToyAvg


def test_a_method_has_a_name_in_kebab_case():
    with pytest.raises(ValueError, match="name: expected words in kebab-case, got 'Toy_Avg'"):
        type("Odd", (Toy,), {"name": "Toy_Avg"})()


TOY = Toy()


def test_an_option_of_one_line_is_known_everywhere(tmp_path):
    """In the signature, the TOML table, what flwr run carries, checkpoints and the list."""
    assert inspect.signature(ToyAvg).parameters["depth"].default == 2
    with pytest.raises(ValueError, match="expected depth = 2, got 3"):
        ToyAvg().load_state_dict(ToyAvg(depth=3).state_dict())
    place = f"{__name__}:TOY"
    (tmp_path / "toy.toml").write_text(f'method = "{place}"\n[toy-avg]\ndepth = 4\n')
    config = Config.load(tmp_path / "toy.toml")
    assert Config.parse(config.run_config()) == config
    assert config.chosen_method is TOY
    assert Config.parse({"method": place, "toy-avg.depth": 5}).settings.depth == 5
    with pytest.raises(ConfigError, match=r"toy-avg\.depth: expected at most 9, got 10"):
        config.replace(toy_avg={"depth": 10})
    own = ["toy-avg.depth"]
    assert [line.split(" = ")[0] for line in Config.describe(place)] == own
    assert Config.describe(place)[-1] == "toy-avg.depth = 2: how deep"
    assert make_strategy(load_setup(config)).depth == config.settings.depth == 4
    assert "toy-avg.depth" not in config.replace(method="fedavg").values()


OWN_MODELS = sorted(n for n, own in own_methods().items() if own.headline.startswith("client"))


@pytest.mark.parametrize("method", OWN_MODELS)
def test_the_model_of_a_client_is_what_the_client_evaluated(tmp_path, method):
    """Of a finished run, by another process's strategy."""
    config = Config(
        method=method, num_clients=4, clients_per_round=4, clients_per_evaluation=4, rounds=2,
        learning_rate=0.1, out=str(tmp_path), local_test_fraction=0.3,
        **{**SETTINGS[method], "projection": 0},
    )  # fmt: skip
    result = run(config, progress=False)
    newest = result.clients[result.clients["round"] == 2]
    reported = newest[newest.metric == "accuracy"].set_index("partition")["value"]
    assert set(reported.index) == set(range(4))
    setup, first = load_setup(result.config), load_predictor(result.folder)
    for client in range(4):
        _, kept = setup.split.train_and_test(client, setup.config)
        x, y = setup.data.x_train[kept], setup.data.y_train[kept]
        own = load_predictor(result.folder, client=client).evaluate(x, y)
        assert own.accuracy == pytest.approx(reported[client], abs=1e-12)
        assert own.loss != first.evaluate(x, y).loss


def test_who_was_mixed_from_whom_is_written_of_each_round(finished_run):
    files = sorted((finished_run("weighted-fedavg").folder / "details").iterdir())
    assert [path.name for path in files] == [f"similarity-00000{i}.npz" for i in (1, 2, 3)]
    with np.load(files[2]) as saved:
        assert saved["server_round"] == 3
        assert saved["weights"].sum(1) == pytest.approx(np.ones(4))


def test_the_app_masks_weights_if_asked(tmp_path):
    """The mean differs by roundings of float32, so the loss hardly does."""
    small = Config(
        method="fedavg", num_clients=5, clients_per_round=4, clients_per_evaluation=0,
        train_examples=150, test_examples=50, learning_rate=0.1,
    )  # fmt: skip
    masked = {"secure": True}
    plain, secure = (
        run(small, **own, rounds=2, out=tmp_path / name, progress=False)
        for name, own in (("plain", {}), ("masked", masked))
    )
    losses = [own.curve("loss").to_numpy() for own in (plain, secure)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"secure: expected clients-per-round"):
        small.replace(**masked, clients_per_round=2)


@pytest.mark.parametrize("inner", sorted(all_methods().keys() - {"fed-ensemble"}))
def test_an_ensemble_is_made_of_any_method_or_says_why_not(inner):
    members = {"num_models": 2, "inner": inner}
    config = FEDAVG.replace(rounds=20, clients_per_round=8, tct={"normalise": False})
    refusal = ""
    try:
        prepare(config.replace(method="fed-ensemble", fed_ensemble=members))
    except ConfigError as error:
        refusal = str(error)
    assert re.fullmatch(r"|.*(work within a FedEnsemble|shows all clients|: network: ).*", refusal)
    assert refusal == "" or inner not in ("fedavg", "scaffold", "ntk-fl", "cp-ntk-fl", "tct")
