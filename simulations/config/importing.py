"""Objects that users name in settings: ``mymethod.py:FedAvgM``, or ``package.module:FedAvgM``."""

import dis
import functools
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, first_line
from .settings import nearest

SEARCHED = "FEDNTK_PATH"  # environment variable: folders where Flower's processes find modules
LIBRARIES = {"builtins", "fedntk", "functools", "torch", "torchmetrics", "torchvision"}


def search_path() -> str:
    """Return the folders where this process finds modules, the working directory among them."""
    return os.pathsep.join(dict.fromkeys([str(Path.cwd()), *filter(None, sys.path)]))


def with_whole_path(named: str) -> str:
    """Return a name with the whole path of its file, if it names one."""
    home, _, name = named.rpartition(":")
    return f"{Path(home).expanduser().absolute()}:{name}" if home.endswith(".py") else named


def import_named(key: str, named: str) -> Any:
    """Return what a setting names; ConfigError if it is not there.

    Modules are also looked for in the working directory, and beside the file. A file that has
    changed since it was loaded is loaded again.
    """
    home, _, name = named.rpartition(":")
    path, is_file = Path(home), home.endswith(".py")
    folders = [*os.environ.get(SEARCHED, search_path()).split(os.pathsep), str(path.parent)]
    sys.path += [folder for folder in folders if folder not in sys.path]
    if is_file and not path.is_file():
        raise ConfigError(f"{key} = {named}: there is no file {home}")
    try:
        module = _load(path) if is_file else importlib.import_module(home)
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ConfigError(f"{key} = {named}: cannot be imported: {first_line(error)}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
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


def source_of(thing: Any, *users: Any) -> str:
    """Return the source of a user's function, or of an object's class, and plain values in use.

    So it changes with an edit, with the settings of an object and with a constant or a function
    that a function uses; `users` are the functions that use it. Libraries' code is left out.
    """
    kind, code = thing if hasattr(thing, "__qualname__") else type(thing), None
    held: dict[str, Any] = {} if kind is thing else {**getattr(thing, "__dict__", {})}
    if isinstance(thing, functools.partial):
        held |= {"": thing.func, **thing.keywords, **{f"{i}": a for i, a in enumerate(thing.args)}}
    text = ""
    if str(kind.__module__).partition(".")[0] not in LIBRARIES:
        code = getattr(thing, "__code__", None)
        try:
            text = inspect.getsource(kind)
        except (OSError, TypeError):  # of a shell, or not in Python
            text = repr(code and (code.co_code, code.co_names))
    if code is not None:
        used = [own.argval for own in dis.get_instructions(code) if own.opname == "LOAD_GLOBAL"]
        held |= {name: thing.__globals__.get(name) for name in used}
        held |= inspect.getclosurevars(thing).nonlocals
    for name, own in sorted(held.items(), key=str):
        if isinstance(own, bool | int | float | str) and name[:1] != "_":
            text += f"{name} = {own!r}"
        elif inspect.isfunction(own) and own not in users:
            text += source_of(own, thing, *users)
    return text


def _load(path: Path) -> ModuleType:
    """Load a file as a module whose name is its path, unless it is loaded and unchanged."""
    name, changed = str(path), path.stat().st_mtime_ns
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__changed__ == changed:
        return loaded
    module = ModuleType(name)
    vars(module).update(__file__=name, __changed__=changed)
    sys.modules[name] = module  # where dataclasses look for it
    try:
        exec(compile(path.read_bytes(), name, "exec"), vars(module))  # noqa: S102
    except BaseException:
        del sys.modules[name]
        raise
    return module
