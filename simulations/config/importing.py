"""What settings name in a user's own code: ``file.py:name`` or ``module:name``."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError, first_line


def absolute(spec: str) -> str:
    """Return ``file.py:name`` with the file's whole path, so that every process finds it.

    A module whose file lies in the working directory is named by that file. All else stays.
    """
    place, colon, name = spec.rpartition(":")
    path = Path(place).expanduser()
    if path.suffix != ".py":
        path = Path(*place.split(".")).with_suffix(".py") if place else path
    return f"{path.absolute()}:{name}" if colon and path.is_file() else spec


def import_object(key: str, spec: str) -> Any:
    """Import what a setting names; `key` is the setting, for errors.

    The file's folder joins the path, as it does for a script. A file that was imported is not read
    again in this process.
    """
    place, _, name = absolute(spec).rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except Exception as error:  # whatever a user's code raises
        raise ConfigError(f"{key} = {spec}: cannot be imported: {first_line(error)}") from error
    if not hasattr(module, name):
        public = ", ".join(own for own in vars(module) if not own.startswith("_")) or "nothing"
        raise ConfigError(f"{key} = {spec}: {place} lacks {name!r}; it has {public}")
    return getattr(module, name)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    name = f"fedntk_own.{path.stem}_{abs(hash(str(path)))}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _import_module(name: str) -> Any:
    return importlib.import_module(name)
