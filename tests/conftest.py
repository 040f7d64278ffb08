"""What the tests of all rooms share."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

ROOT = Path(__file__).parent.parent
# files on a page, by name
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
sys.path.append(str(ROOT / "docs"))  # what makes the pages is tested, too


def refused(
    message: str, call: Callable[..., Any], *given: Any, error: Any = ValueError, **named: Any
) -> None:
    with pytest.raises(error, match=message):
        call(*given, **named)


def output_of(*command: object, **options: Any) -> str:
    """Run a command that must succeed, and return what it says."""
    done = subprocess.run(  # noqa: S603 - our own programs
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what runs cache out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a benchmark by its name, or by folder and name."""

    def imported(name: str) -> Any:
        path = ROOT / "benchmarks" / f"{name}.py"
        monkeypatch.syspath_prepend(path.parent)
        return importlib.import_module(path.stem)

    return imported


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets beside the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the real data sets are not at {folder}")
    return folder
