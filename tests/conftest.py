"""What the tests of all rooms share."""

import importlib
import json
import os
import re
import shutil
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


@pytest.fixture
def chrome() -> Iterator[Any]:
    """Yield a browser that writes down what it is asked to load."""
    selenium = pytest.importorskip("selenium.webdriver")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("no chromium with chromedriver is here")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with selenium.Chrome(options, selenium.ChromeService(driver)) as chrome:
        yield chrome


def show(chrome: Any, width: int, scheme: str) -> None:
    """Give the browser a window of a width in pixels, light or dark."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def requests_of(chrome: Any) -> list[str]:
    events = [json.loads(each["message"])["message"] for each in chrome.get_log("performance")]
    sent = [each for each in events if each["method"] == "Network.requestWillBeSent"]
    return [each["params"]["request"]["url"] for each in sent]
