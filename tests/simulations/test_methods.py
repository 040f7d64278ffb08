"""A method is an object with all that the simulations ask; other packages may bring one."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from fedntk.clients import SGDClient, WeightedFedAvgClient
from fedntk.ntk.options import option
from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.config import config as config_module
from fedntk.simulations.config.settings import ConfigError, Settings
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.methods import own_methods
from fedntk.simulations.methods.method import Method
from fedntk.strategies import SeededFedAvg

from .settings import SETTINGS

PACKAGE = """
    from fedntk.clients import SGDClient
    from fedntk.simulations.methods.method import Method
    from fedntk.simulations.config.settings import ConfigError, Settings, setting
    from fedntk.strategies import SeededFedAvg

    class HalfSettings(Settings, frozen=True, eq=True):
        share: float = setting(0.5, "of the rate that clients use", above=0, at_most=1)

    class Half(Method[HalfSettings]):
        name = "half-avg"
        strategy_class = SeededFedAvg
        client_class = SGDClient
        own_settings = HalfSettings

        def check(self, config, settings):
            if config.loss == "mse":
                raise ConfigError("half-avg takes loss = cross-entropy, got mse")

        def client(self, setup, partition, options):
            options["learning_rate"] = setup.config.learning_rate * self.own(setup.config).share
            return super().client(setup, partition, options)

    METHOD = Half()
"""
ENTRIES = """
    [fedntk.methods]
    half-avg = half_avg:METHOD
    missing = half_avg:NOTHING
    twice = fedntk.simulations.methods.tct:METHOD
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Folder with a package that names a method, as pip would leave it."""
    folder = tmp_path / "packages"
    described = folder / "half_avg-1.0.dist-info"
    described.mkdir(parents=True)
    (folder / "half_avg.py").write_text(textwrap.dedent(PACKAGE))
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: half-avg\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(textwrap.dedent(ENTRIES))
    return folder


def with_package(package: Path, code: str, *arguments: str) -> str:
    """Run Python where the package is installed, and return what it says."""
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=False, cwd=package.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


RUN = """
import sys
import pytest
from fedntk.simulations import Config, ConfigError, load_model, load_predictor, run
engine = sys.argv[1]
common = dict(num_clients=6, clients_per_round=3, clients_per_evaluation=0, rounds=2,
              local_epochs=2, progress=False)
base = Config(learning_rate=0.2)
other = run(base, method="half-avg", half_avg={"share": 0.25}, out="a", engine=engine, **common)
plain = run(base, method="fedavg", learning_rate=0.05, out="b", **common)
bits = [{k: a.tobytes() for k, a in load_model(r.folder).items()} for r in (other, plain)]
assert bits[0] == bits[1]
assert type(load_predictor("a")).__name__ == "NetworkPredictor"
assert Config.describe("half-avg") == ["half-avg.share = 0.5: of the rate that clients use"]
with pytest.raises(ConfigError, match="half-avg.share: expected at most 1, got 2.0"):
    base.replace(method="half-avg", half_avg={"share": 2})
with pytest.raises(ConfigError, match="half-avg takes loss = cross-entropy, got mse"):
    base.replace(method="half-avg", loss="mse")
"""


@pytest.mark.parametrize(
    "engine",
    ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.xdist_group("ray")])],
)
def test_another_packages_method_runs_with_its_settings(package, engine):
    """FedAvg at a share of the rate has the bits of FedAvg at that rate."""
    said = with_package(package, RUN, engine)
    assert "method missing (half_avg:NOTHING) is left out: AttributeError" in said
    assert "there is a method 'fedavg' already" in said


class ToyAvg(SeededFedAvg):
    """FedAvg with one option more."""

    depth: int = option("how deep", default=2, at_least=1, at_most=9)


class Toy(Method[Settings]):
    name = "toy-avg"
    strategy_class = ToyAvg
    client_class = SGDClient


def test_an_option_of_one_line_is_known_everywhere(monkeypatch, tmp_path):
    """In the signature, the TOML table, the key of flwr run, checkpoints and the docs' table."""
    assert inspect.signature(ToyAvg).parameters["depth"].default == 2
    with pytest.raises(ValueError, match="expected depth = 2, got 3"):
        ToyAvg().load_state_dict(ToyAvg(depth=3).state_dict())

    methods = {**own_methods(), "toy-avg": Toy()}
    for name in ("own_methods", "all_methods"):
        monkeypatch.setattr(config_module, name, lambda: methods)
    config_module._keys.cache_clear()
    try:
        file = tmp_path / "toy.toml"
        file.write_text('method = "toy-avg"\n[toy-avg]\ndepth = 4\n')
        config = Config.load(file)
        assert config.settings.depth == 4
        assert Config.parse({"method": "toy-avg", "toy-avg.depth": 5}).settings.depth == 5
        with pytest.raises(ConfigError, match=r"toy-avg\.depth: expected at most 9, got 10"):
            config.replace(toy_avg={"depth": 10})
        assert Config.describe("toy-avg") == ["toy-avg.depth = 2: how deep"]
        assert make_strategy(load_setup(config)).depth == 4
    finally:
        config_module._keys.cache_clear()


@pytest.mark.parametrize(
    "method",
    sorted(name for name, method in own_methods().items() if method.headline.startswith("client")),
)
def test_the_model_of_a_client_is_what_the_client_evaluated(tmp_path, method):
    """Where clients have models of their own: of a finished run, by another process's strategy."""
    config = Config(
        method=method, num_clients=4, clients_per_round=4, clients_per_evaluation=4, rounds=2,
        learning_rate=0.1, out=str(tmp_path), local_test_fraction=0.3,
        **{**SETTINGS[method], "projection": 0},
    )  # fmt: skip
    result = run(config, progress=False)
    newest = result.clients[result.clients["round"] == 2]
    reported = newest[newest.metric == "accuracy"].set_index("partition")["value"]
    assert set(reported.index) == set(range(4))
    setup = load_setup(result.config)
    first = load_predictor(result.folder)
    for client in range(4):
        x, y = setup.examples(client).test
        own = load_predictor(result.folder, client=client).evaluate(x, y)
        assert own.accuracy == pytest.approx(reported[client], abs=1e-12)
        assert own.loss != first.evaluate(x, y).loss


def test_who_was_mixed_from_whom_is_written_of_each_round_in_which_anyone_was(
    tmp_path, monkeypatch
):
    """All clients fail in round 2, which leaves the models as they were."""
    fit = WeightedFedAvgClient.fit

    def failing(self, parameters, config):
        if config["server-round"] == 2:
            raise RuntimeError("out of memory")
        return fit(self, parameters, config)

    monkeypatch.setattr(WeightedFedAvgClient, "fit", failing)
    result = run(
        Config(method="weighted-fedavg", num_clients=4, clients_per_round=3, rounds=3),
        out=tmp_path, progress=False,
    )  # fmt: skip
    files = sorted((result.folder / "details").iterdir())
    assert [path.name for path in files] == ["similarity-000001.npz", "similarity-000003.npz"]
    with np.load(files[1]) as saved:
        assert saved["server_round"] == 3
        assert saved["weights"].sum(1) == pytest.approx(np.ones(3))


@pytest.mark.parametrize("method", ["local-training", "fed-proto"])
def test_patience_by_a_model_that_never_changes_is_refused(method):
    with pytest.raises(ConfigError, match=f"with {method} the server's model never changes, so "):
        Config(method=method, patience=3)
    assert Config(method=method, patience=3, monitor="client-accuracy-mean").patience == 3
