"""Objects that users name in settings: ``mymethod.py:FedAvgM``, or ``package.module:FedAvgM``.

Whether such an object is the one of an earlier run is decided here. One that a text names is the
same as long as its source files are (:func:`source_checksum`). One that was passed in Python may
hold anything, so it counts as another in each call: its name ends with ``#`` and a random id.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import site
import sys
import sysconfig
import uuid
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, first_line
from .settings import nearest

SEARCHED = "FEDNTK_PATH"  # environment variable: folders where Flower's processes find modules
ID = re.compile(r"#([0-9a-f]{12})(?=,|$)")  # ends the name of an object that was passed in Python
UNTRUSTED = "#untrusted"  # ends the name of code that only a run's folder names: not imported
FEDNTKS = re.compile(r"fedntk(\.\w+)*:\w+(,\w+)*")  # names of what comes with this package
LARGE = {"fedntk", "numpy", "sklearn", "torch", "torchmetrics", "torchvision"}  # not read
LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in (*map(sysconfig.get_path, ("stdlib", "purelib")), *site.getsitepackages())
)
_named: set[str] = set()  # code that this process named, or trusted in a run's folder
STRANGE: ContextVar[bool] = ContextVar("strange", default=False)  # a stranger's settings are read
_loaded: dict[str, dict[str, str]] = {}  # module -> checksums of its source files when imported
_added: list[str] = []  # folders that earlier imports put on sys.path, the newest first
_seen: dict[str, str] = {}  # file -> its checksum when a module that imports it was last imported


def search_path() -> str:
    """Return the folders where this process finds modules, the working directory among them."""
    return os.pathsep.join(dict.fromkeys([str(Path.cwd()), *filter(None, sys.path)]))


def whole_name(named: str) -> str:
    """Return a name with its file's whole path; a stranger's code is marked, not imported."""
    home, _, name = named.rpartition(":")
    if home == "__main__" and not ID.search(named):
        named = f"{named}#{_new_id()}"
    elif home.endswith(".py"):
        named = f"{Path(home).expanduser().absolute()}:{name}"
    place = ID.sub("", named)
    if STRANGE.get() and home and place not in _named and not FEDNTKS.fullmatch(place):
        return place.replace(",", f"{UNTRUSTED},") + UNTRUSTED  # each of several classes
    _named.add(place)
    return named


def name_object(thing: Any, place: str = "") -> str:
    """Return a new name for an object: its place, or one of this process, and an id."""
    place = place or place_of(thing)
    if not is_of_one_process(place) and "," not in place:
        home, _, name = place.rpartition(":")
        there: Any = sys.modules.get(home)
        for part in name.split("."):
            there = getattr(there, part, None)
        place += "" if there is thing or not callable(thing) else "()"
    return f"{place}#{_new_id()}"


def id_of(named: str) -> str:
    """Return the id of the object that is named; empty if none is."""
    return next(iter(ID.findall(named)), "")


def renew_names(named: str, before: str = "") -> str:
    """Return a setting with new ids, or the setting `before` if that differs only in ids."""
    same = before and ID.sub("", before) == ID.sub("", named)
    return before if same else ID.sub(lambda _: f"#{_new_id()}", named)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def import_named(key: str, named: str) -> Any:
    """Return what a setting names, loaded again if its source changed; else ConfigError."""
    home, _, name = ID.sub("", named).rpartition(":")
    path, is_file = Path(home), home.endswith(".py")
    if named.endswith(UNTRUSTED):
        file = path if is_file else _file_of(home, _folders(home)) or home
        raise ConfigError(
            f"{key} = {named.removesuffix(UNTRUSTED)}: only the run's folder names this code, and "
            f"{file} would be executed; read it, then pass trust=True (--trust), or another folder"
        )
    before = [folder for folder in sys.path if folder not in _added]
    sys.path[:] = _folders(home)
    _added[:] = [folder for folder in sys.path if folder not in before]
    if is_file and not path.is_file():
        raise ConfigError(f"{key} = {named}: there is no file {home}")
    try:
        sources = _forget_changed(home)
        module = _load(path) if is_file else importlib.import_module(home)
        _loaded[home] = sources
        _seen.update(sources)
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ConfigError(f"{key} = {named}: cannot be imported: {first_line(error)}") from error
    try:
        thing = functools.reduce(getattr, name.split("."), module)
        if home.startswith("fedntk.") and not str(getattr(thing, "__module__", "")).startswith(
            "fedntk."
        ):
            raise ConfigError(f"{key} = {named}: expected a part of fedntk's own, got {thing!r}")
        return thing
    except AttributeError:
        cure = nearest(name, vars(module))
        if is_of_one_process(named):
            cure = "; run the cell or script that defines it again"
        raise ConfigError(f"{key} = {named}: {home} has no {name}{cure}") from None


def place_of(thing: Any) -> str:
    """Return ``module:name`` of a class or function; of another object its class, with ``()``."""
    named = hasattr(thing, "__qualname__")
    kind = thing if named else type(thing)
    return f"{kind.__module__}:{kind.__qualname__}{'' if named else '()'}"


def is_of_one_process(named: str) -> bool:
    """Whether what is named is an object, or was made in a notebook, a script or a function."""
    return named.startswith("__main__:") or "<" in named or "()" in named


def require_importable(key: str, named: str, *, what: str = "it", same: bool = True) -> None:
    """Refuse what other processes of a run cannot import, or would not find to be the `same`."""
    if same and not is_of_one_process(named):
        return
    name = re.findall(r"\w+", named.partition("()")[0])[-1]
    raise ConfigError(
        f"{key} = {named}: other processes that take part in the run cannot import it; put {what} "
        f"into a file, such as my{key}.py, and pass {key}='my{key}.py:{name}'"
    )


def source_checksum(*named: str) -> str:
    """SHA-256 of the source of what is named, with all it imports but libraries; or empty."""
    homes = [place.rpartition(":")[0] for place in named if not ID.search(place)]
    checksums = [list(_checksums(_files(home)).values()) for home in homes if home]
    sources = [files for files in checksums if files]
    return hashlib.sha256(repr(sources).encode()).hexdigest() if sources else ""


def _folders(home: str) -> list[str]:
    """Return the folders where a module is looked for, in order: those of other calls last."""
    folders = os.environ.get(SEARCHED, str(Path.cwd())).split(os.pathsep)
    if home.endswith(".py"):
        folders.append(str(Path(home).parent))
    others = [folder for folder in _added if folder in sys.path]
    before = [folder for folder in sys.path if folder not in others]
    return list(dict.fromkeys([*before, *folders, *others]))


def _checksums(files: list[tuple[str, Path]]) -> dict[str, str]:
    """Return file -> checksum of what :func:`_files` found."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for _, path in files}


def _files(home: str) -> list[tuple[str, Path]]:
    """Return name and file of a module and, by their imports, of all that users may edit."""
    is_file, folders = home.endswith(".py"), _folders(home)
    package = "" if is_file else home.partition(".")[0]
    left: list[tuple[str, Path | None]] = [("", Path(home)) if is_file else (home, None)]
    modules: set[str] = set()
    files: list[tuple[str, Path]] = []
    while left:
        name, path = left.pop()
        wanted = [name]
        if path is not None and path.is_file():
            files.append((name, path))
            state = path.stat()
            wanted = _imports(name, path, state.st_mtime_ns, state.st_ctime_ns, state.st_size)
        for parts in (module_name.split(".") for module_name in wanted):
            for module in itertools.accumulate(parts, "{}.{}".format):  # and its packages
                if module in modules or parts[0] in ("", *LARGE):
                    continue
                modules.add(module)
                file = _file_of(module, folders)
                if file and (parts[0] == package or not str(file).startswith(LIBRARIES)):
                    left.append((module, file))
    return files


def _file_of(module: str, folders: list[str]) -> Path | None:
    """Return the file of a module in the first folder that has it, or of one that is loaded."""
    places = [Path(folder, *module.split(".")).absolute() for folder in folders]
    for place in places:
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    loaded = getattr(sys.modules.get(module), "__file__", None)
    return Path(loaded) if loaded else None


@functools.lru_cache(maxsize=1024)
def _imports(name: str, path: Path, *_state: int) -> list[str]:
    """Return the modules, and what may be modules, that a file imports in any place."""
    modules: list[str] = []
    tree = ast.parse(path.read_bytes() if path.suffix == ".py" else b"")
    above = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = above[: len(above) - node.level + 1] if node.level else []
            parts = [*home, *filter(None, [node.module])]
            modules += [".".join([*parts, alias.name]) for alias in node.names]
    return modules


def _forget_changed(home: str) -> dict[str, str]:
    """Remove a module and what it imports, also compiled, if one changed; return sources."""
    files = _files(home)
    sources = _checksums(files)
    for name, path in files:  # one of this name may come from another folder
        loaded_from = getattr(sys.modules.get(name), "__file__", None)
        if loaded_from and Path(loaded_from).resolve() != path.resolve():
            del sys.modules[name]
    changed = any(_seen.get(file, digest) != digest for file, digest in sources.items())
    if changed or _loaded.get(home, sources) != sources:
        for name, module in [*sys.modules.items()]:
            if name != "__main__" and getattr(module, "__file__", None) in sources:
                del sys.modules[name]
        importlib.invalidate_caches()
    loaded = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    for file in sources.keys() - loaded:
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
    return sources


def _load(path: Path) -> ModuleType:
    """Load a file as a module whose name is its path, unless it is loaded."""
    name = str(path)
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = name
    sys.modules[name] = module  # where dataclasses look for it
    try:
        exec(compile(path.read_bytes(), name, "exec"), vars(module))  # noqa: S102
    except BaseException:
        del sys.modules[name]
        raise
    return module
