"""One method, one stem, in every room; public names complete; defaults in one place."""

import ast
import importlib
import tomllib

import pytest
from flwr.client import NumPyClient
from flwr.serverapp.strategy import Strategy

from fedntk.simulations.config import Config
from fedntk.simulations.methods import METHODS

from .conftest import ROOT

ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")
OURS = sorted(set(METHODS) - {"fedavg"})  # FedAvg is Flower's
BASELINES = {"scaffold"}  # others' methods, to compare with: no notebook of their own


@pytest.mark.parametrize("method", OURS)
def test_method_has_its_file_in_every_room(method):
    stem = method.replace("-", "_")
    paths = [
        f"strategies/{stem}.py",
        f"clients/{stem}.py",
        f"tests/strategies/test_{stem}.py",
        f"tests/clients/test_{stem}.py",
    ]
    if method not in BASELINES:
        paths.append(f"notebooks/{stem}.ipynb")
    for path in paths:
        assert (ROOT / path).is_file(), path
    assert list((ROOT / "simulations" / "conf").glob(f"{stem}*.toml"))


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_are_exported_and_exist(room):
    package = importlib.import_module(f"fedntk.{room}")
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize(("room", "base"), [("strategies", Strategy), ("clients", NumPyClient)])
def test_every_strategy_and_client_is_exported(room, base):
    package = importlib.import_module(f"fedntk.{room}")
    for path in (ROOT / room).glob("[!_]*.py"):
        module = importlib.import_module(f"fedntk.{room}.{path.stem}")
        for name, value in vars(module).items():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, base) and not name.startswith("_"):
                assert name in package.__all__


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down_only(room):
    """simulations -> strategies, clients -> trust -> ntk; the last two know no Flower."""
    allowed = {
        "ntk": set(),
        "trust": {"ntk"},
        "clients": {"ntk", "trust"},
        "strategies": {"ntk", "trust"},
        "simulations": {"ntk", "trust", "clients", "strategies"},
    }[room]
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                if name.startswith("fedntk."):
                    assert name.split(".")[1] in allowed, f"{path}: {name}"
                if room in ("ntk", "trust"):
                    assert not name.startswith("flwr"), f"{path}: {name}"


def test_run_config_of_the_flower_app_equals_the_defaults():
    app = tomllib.loads((ROOT / "simulations" / "pyproject.toml").read_text(encoding="utf-8"))
    assert app["tool"]["flwr"]["app"]["config"] == Config().values()
    assert app["project"]["dependencies"] == []


@pytest.mark.parametrize("path", sorted((ROOT / "simulations" / "conf").glob("*.toml")))
def test_every_configuration_file_is_valid(path):
    config = Config.load(path)
    assert path.stem.startswith(config.method.replace("-", "_"))
