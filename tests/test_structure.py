"""One method, one stem, in every room; public names complete; defaults in one place."""

import ast
import functools
import importlib
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import fedntk.clients
import fedntk.strategies
from fedntk.clients import TCTClient
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.simulations import Config
from fedntk.simulations.methods import own_methods
from fedntk.strategies import NTKFL, TCT, OneExchange, Strategy
from fedntk.strategies.core.sampling import Sampling

from .conftest import ROOT, output_of

METHODS = own_methods()
ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
CLIENT_TESTS = sorted((ROOT / "tests" / "clients").glob("test_*.py"))


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def toml(path):
    return tomllib.loads(read(path))


APP = toml("simulations/pyproject.toml")
FLOWER_APP = APP["tool"]["flwr"]["app"]


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(read(path))))


def stem(method):
    return method.replace("-", "_")


def file_stem(kind):
    return kind.__module__.rpartition(".")[2]


def dotted(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"fedntk.{module}".removesuffix(".__init__")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_file_in_every_room_and_is_where_readers_look(method):
    """Several methods may share the file of their clients."""
    own, client = stem(method), METHODS[method].client_class
    sharing = [other for other in METHODS if METHODS[other].client_class is client]
    assert file_stem(METHODS[method].strategy_class) == own
    assert file_stem(client) == own or len(sharing) > 1
    assert any(re.search(rf"\b{client.__name__}\b", read(path)) for path in CLIENT_TESTS)
    family = METHODS[method].strategy_class.__module__.split(".")[-2]  # whose methods may share one
    tests = [ROOT / "tests" / "strategies" / f"test_{name}.py" for name in (own, family)]
    assert any(path.is_file() for path in tests), tests
    assert METHODS[method].baseline or (ROOT / "notebooks" / f"{own}.ipynb").is_file()
    configs = [Config.load(path) for path in (ROOT / "simulations" / "conf").glob(f"{own}*.toml")]
    assert {config.method for config in configs} == {method}
    for path in ("README.md", "docs/choosing.md"):
        assert f"methods/{own}.md" in read(path), path
    text = read(f"docs/methods/{own}.md")
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert [head for head in headings if head != "Differences from the paper"] == [
        "What it does", "When to use it", "Use it", "Options", "Results", "What it costs",
        "Limits",
    ]  # fmt: skip
    for part in (f"<!-- settings: {method} -->", "\n| bytes of one client", "**Exchanges.**"):
        assert part in text


def is_shared(path):
    """Whether a file serves several methods, and so knows none."""
    room, *folders, _ = path.relative_to(ROOT).parts
    if folders[:1] == ["tables"]:  # programs of one paper's tables
        return False
    if room == "simulations":
        return folders != ["methods"] or path.stem in {"decentralised", "method"}
    if room not in ("strategies", "clients") or path.stem == "__init__":
        return False
    own = any(path.stem == name or path.stem.startswith(f"{name}_") for name in map(stem, METHODS))
    return folders == ["core"] or (
        folders in (["gossip"], ["personal"], ["closed_form"]) and not own
    )


@functools.cache
def names_of_methods():
    """Names, and the classes that the files of one method define."""
    stems = set(map(stem, METHODS)) - {"fedavg"}
    own = [node for path in FILES if path.stem in stems for node in nodes(path)]
    return set(METHODS) | {node.name for node in own if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(
    "path", [*filter(is_shared, FILES)], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_shared_file_knows_a_method(path):
    """No string, import or name in its code is a method's; the default of `method` may be."""
    found = {
        getattr(n, field, None) for n in nodes(path) for field in ("value", "id", "attr", "name")
    }
    modules = [n.module or "" for n in nodes(path) if isinstance(n, ast.ImportFrom)]
    found |= {module.rpartition(".")[2].replace("_", "-") for module in modules}
    default = {"ntk-fl"} if path == ROOT / "simulations" / "config" / "config.py" else set()
    assert found & names_of_methods() == default


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_exist_and_every_strategy_and_client_is_one(room):
    package = importlib.import_module(f"fedntk.{room}")
    assert len(package.__all__) == len(set(package.__all__))
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []
    pieces = (Strategy, Sampling, NTKFL, TCT, OneExchange, TCTClient)
    layers = [base for piece in pieces for base in piece.__mro__]
    for path in (ROOT / room).rglob("[!_]*.py") if room in ("strategies", "clients") else ():
        module = importlib.import_module(dotted(path))
        for name, value in vars(module).items():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, Strategy | NumPyClient) and not name.startswith("_"):
                assert name in package.__all__ or value in layers


def test_rooms_folders_and_files_import_downwards_only():
    """As pyproject.toml says; also in functions, and for types."""
    output_of(Path(sys.executable).with_name("lint-imports"), "--no-cache", cwd=ROOT)


# where modules are imported by a name that is computed
BY_NAME = {
    "simulations/__init__.py",  # public names, when first used
    "simulations/config/importing.py",  # what users name in settings
}


def test_no_import_is_hidden_from_the_graph():
    calling = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and re.search(r"\b(import_module|__import__|resolve_name)$", ast.unparse(node.func))
    }
    assert calling == BY_NAME


# what Flower documents for apps; and where else, and why, its other modules are imported
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
ELSEWHERE = {
    "clients/core/numpy_client.py": {"flwr.client"},  # kept for compatibility
    "simulations/engine/_flower.py": {
        *("flwr.supercore.run", "flwr.supercore.task_identity"),
        "flwr.simulation.ray_transport",  # whose pool of actors keeps dead ones
    },
    "tests/simulations/test_engines.py": {"flwr.simulation.ray_transport.ray_actor"},  # that pool
    "benchmarks/cases.py": {"flwr.simulation"},  # measures Flower's own engine
}


def test_flowers_other_modules_are_imported_in_one_file_each():
    """By any statement, at any depth; also by an import of a module that is given as text."""
    places = ("fedntk", *ROOMS, "benchmarks", "docs", "examples", "tests")
    for path in (path for place in places for path in sorted((ROOT / place).rglob("*.py"))):
        names = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module)
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
        flower = {name for name in names if str(name).split(".")[0] == "flwr"} - PUBLIC
        name = path.relative_to(ROOT).as_posix()
        assert flower == ELSEWHERE.get(name, set()), name


def flat(table, prefix=""):
    """Return the keys of tables in tables with dots between them, as ``flwr run`` has them."""
    rows = {}
    for key, value in table.items():
        rows |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return rows


def test_files_agree_on_defaults_and_versions():
    assert flat(FLOWER_APP["config"]) == Config.run_config_defaults()
    assert APP["project"]["version"] == fedntk.__version__
    assert f"\nversion: {fedntk.__version__}\n" in read("CITATION.cff")
    assert f"\n## {fedntk.__version__} - " in read("CHANGELOG.md")
    (flower,) = APP["project"]["dependencies"]
    assert flower in toml("pyproject.toml")["project"]["dependencies"]
    assert f"flwr=={FLOWER_APP['flwr-version-target']}" in read("constraints.txt").splitlines()


def test_a_folder_named_fedntk_in_the_working_directory_is_not_taken_for_the_package(tmp_path):
    """Such as a clone beside it: Ray's workers would run other code than the server."""
    (tmp_path / "fedntk" / "ntk").mkdir(parents=True)
    (tmp_path / "fedntk" / "ntk" / "__init__.py").write_text("raise RuntimeError('shadowed')")
    code = "import fedntk, fedntk.ntk; print(fedntk.__version__, fedntk.ntk.__file__)"
    version, file = output_of(sys.executable, "-c", code, cwd=tmp_path).split()
    assert version == fedntk.__version__
    assert Path(file).resolve() == ROOT / "ntk" / "__init__.py"


def test_a_clone_has_every_room_without_an_installation():
    code = "from importlib.util import find_spec as f\nfor r in {}: print(f('fedntk.' + r).origin)"
    places = output_of(sys.executable, "-S", "-c", code.format([*ROOMS]), cwd=ROOT).split()
    assert [Path(place).parent.name for place in places] == [*ROOMS]


def test_a_clone_without_links_says_how_to_get_them(tmp_path):
    """Git writes the target of a link into a file where it may not make links."""
    (tmp_path / "fedntk").mkdir()
    shutil.copy(ROOT / "fedntk" / "__init__.py", tmp_path / "fedntk")
    (tmp_path / "fedntk" / "ntk").write_text("../ntk")
    code = "try: import fedntk\nexcept ImportError as error: print(error)"
    assert "core.symlinks=true" in output_of(sys.executable, "-c", code, cwd=tmp_path)
