"""One method, one stem, in every room; public names complete; defaults in one place."""

import ast
import functools
import graphlib
import importlib
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.client import NumPyClient
from flwr.common.config import flatten_dict
from flwr.serverapp.strategy import Strategy

import fedntk.clients
import fedntk.strategies
from fedntk.simulations.config.config import Config
from fedntk.simulations.methods import own_methods
from fedntk.strategies import TCT, BaseStrategy
from fedntk.strategies.core.sampling import Sampling

from .conftest import ROOT

ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")
METHODS = own_methods()
PUBLIC = fedntk.strategies.__all__


BASES = {"decentralised", "method"}  # in simulations/methods


def stem(method):
    return method.replace("-", "_")


def file_of(room, name):
    """The file of a stem in a room, whatever family's folder it is in."""
    (path,) = (ROOT / room).rglob(f"{name}.py")
    return path


def dotted(path):
    return "fedntk." + ".".join(path.relative_to(ROOT).with_suffix("").parts)


def client_of(method):
    """The class of the clients that the method's strategy names."""
    path = file_of("strategies", stem(method))
    module = importlib.import_module(dotted(path))
    classes = [v for v in vars(module).values() if isinstance(v, type)]
    (name,) = {
        c.client
        for c in classes
        if issubclass(c, BaseStrategy) and c.__module__ == module.__name__ and c.__name__ in PUBLIC
    }
    return getattr(fedntk.clients, name)


def client_stem(method):
    """Stem of the file of its clients: its own, or that of a class which several methods share."""
    return client_of(method).__module__.rpartition(".")[2]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_file_in_every_room_and_is_where_readers_look(method):
    """In the site's navigation, the tables of three pages, and its own page with all sections."""
    own, its_client = stem(method), client_stem(method)
    paths = [
        file_of("strategies", own), f"docs/methods/{own}.md",
        f"tests/strategies/test_{own}.py", file_of("clients", its_client),
        f"tests/clients/test_{its_client}.py",
    ]  # fmt: skip
    sharing = [other for other in METHODS if client_stem(other) == its_client]
    assert its_client == own or len(sharing) > 1, f"{its_client} is of {method} alone"
    if not METHODS[method].baseline:
        paths.append(f"notebooks/{own}.ipynb")
    for path in paths:
        assert (ROOT / path).is_file(), path
    assert list((ROOT / "simulations" / "conf").glob(f"{own}*.toml"))
    for path in ("mkdocs.yml", "README.md", "docs/index.md", "docs/choosing.md"):
        assert f"methods/{own}.md" in (ROOT / path).read_text(encoding="utf-8"), path
    text = (ROOT / "docs" / "methods" / f"{own}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == [
        "What it does", "When to use it", "Use it", "Options", "What it costs", "Results",
        "Limits",
    ]  # fmt: skip
    assert f"<!-- settings: {method} -->" in text
    assert f"<!-- table: costs: {own} -->" in text
    assert "**Exchanges.**" in text


def shared_files():
    """Files that serve all methods, and so know none."""
    stems = set(map(stem, METHODS))
    for path in sorted((ROOT / "simulations").rglob("*.py")):
        if path.parent.name != "methods" or path.stem in {"__init__", *BASES}:
            yield path
    for room in ("strategies", "clients"):
        yield from sorted((ROOT / room / "core").glob("*.py"))
        for family in ("gossip", "personal", "closed_form"):
            for path in sorted((ROOT / room / family).glob("*.py")):
                own = any(path.stem == s or path.stem.startswith(f"{s}_") for s in stems)
                if not own and path.stem != "__init__":
                    yield path


@functools.cache
def names_of_methods():
    """Names, and the classes that the files of one method define."""
    names = set(METHODS)
    for room, method in itertools.product(
        ("strategies", "clients", "simulations/methods"), METHODS
    ):
        for path in (ROOT / room).rglob(f"{stem(method)}.py"):
            if method == "fedavg":
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return names


@pytest.mark.parametrize(
    "path", list(shared_files()), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_shared_file_knows_a_method(path):
    """No string, import or name in its code is a method's; the default of `method` may be."""
    names, found = names_of_methods(), []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.alias):
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "").replace("_", "-").rpartition(".")[2])
        elif isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
    known = sorted(set(found) & names)
    default = ["ntk-fl"] if path == ROOT / "simulations" / "config" / "config.py" else []
    assert known == default


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_are_exported_and_exist(room):
    package = importlib.import_module(f"fedntk.{room}")
    assert len(package.__all__) == len(set(package.__all__))
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []


@pytest.mark.parametrize(("room", "base"), [("strategies", Strategy), ("clients", NumPyClient)])
def test_every_strategy_and_client_is_exported(room, base):
    package = importlib.import_module(f"fedntk.{room}")
    for path in (ROOT / room).rglob("[!_]*.py"):
        module = importlib.import_module(dotted(path))
        for name, value in vars(module).items():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, base) and not name.startswith("_"):
                is_layer = value in BaseStrategy.__bases__ + Sampling.__bases__ + TCT.__bases__
                assert name in package.__all__ or is_layer


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down_only(room):
    """simulations -> strategies, clients -> trust -> ntk; the last two know no Flower."""
    allowed = {
        "ntk": set(),
        "trust": {"ntk"},
        "clients": {"ntk", "trust"},
        "strategies": {"ntk", "trust"},
        # its module for Flower stands outside of the package there, and names it in full
        "simulations": {"ntk", "trust", "clients", "strategies", "simulations"},
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
    assert flatten_dict(app["tool"]["flwr"]["app"]["config"]) == Config.default_run_config()


def test_the_flower_app_names_what_bundles_of_format_1_must():
    """Flower with the versions that fedntk takes, and a licence that is in the app itself."""
    app = tomllib.loads((ROOT / "simulations" / "pyproject.toml").read_text(encoding="utf-8"))
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (flower,) = app["project"]["dependencies"]
    assert flower in whole["project"]["dependencies"]
    licence = app["project"]["license"]["file"]
    assert (ROOT / "simulations" / licence).read_bytes() == (ROOT / "LICENSE").read_bytes()
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"flwr=={app['tool']['flwr']['app']['flwr-version-target']}" in pinned


def test_flower_finds_the_app_without_importing_torch():
    """As ``flwr run`` does; each bundle has the module that it looks for."""
    code = (
        "import sys; from pathlib import Path; from flwr.cli.config_utils import load_and_validate;"
        f"print(load_and_validate(Path({str(ROOT / 'simulations' / 'pyproject.toml')!r})));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own program
    app = tomllib.loads((ROOT / "simulations" / "pyproject.toml").read_text(encoding="utf-8"))
    components = app["tool"]["flwr"]["app"]["components"]
    for reference in components.values():
        module, _, name = reference.partition(":")
        assert f"{module}.py" in app["tool"]["flwr"]["app"]["fab-include"]
        assert hasattr(importlib.import_module(f"fedntk.simulations.{module}"), name)


@pytest.mark.parametrize("path", sorted((ROOT / "simulations" / "conf").glob("*.toml")))
def test_every_configuration_file_is_valid(path):
    config = Config.load(path)
    assert path.stem.startswith(config.method.replace("-", "_"))


def test_a_folder_named_fedntk_in_the_working_directory_is_not_taken_for_the_package(tmp_path):
    """Such as a clone beside it: Ray's workers would run other code than the server."""
    (tmp_path / "fedntk" / "ntk").mkdir(parents=True)
    (tmp_path / "fedntk" / "ntk" / "__init__.py").write_text("raise RuntimeError('shadowed')")
    code = "import fedntk, fedntk.ntk; print(fedntk.__version__, fedntk.ntk.__file__)"
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    version, file = done.stdout.split()
    assert version == fedntk.__version__
    assert Path(file).resolve() == ROOT / "ntk" / "__init__.py"


def imported_modules():
    """Module -> the package's modules that it imports, at its top, in a function or for types."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    modules = {dotted(path).removesuffix(".__init__"): path for path in files}
    found = {module: set() for module in modules}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                named = "." * node.level + (node.module or "")
                home = importlib.util.resolve_name(named, package)
                names = {f"{home}.{alias.name}" for alias in node.names}
                found[module] |= {name if name in modules else home for name in names}
        found[module] &= modules.keys()
    return found


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter(imported_modules()).prepare()  # raises CycleError, with the circle


def test_every_folder_with_modules_is_installed():
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    found = {"fedntk", "fedntk.simulations.conf"}
    found |= {"fedntk." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(described["tool"]["setuptools"]["packages"]) == found
