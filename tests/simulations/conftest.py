"""Fixtures that tests of runs share."""

import functools
from collections.abc import Callable

import pytest

from fedntk.simulations import Run, run
from fedntk.simulations.engine.recorder import AdmittedMetrics

from .settings import SETTINGS, SMALL


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Callable[[str], Run]:
    """A finished run of a method, which tests only read; run once in each process of tests."""

    @functools.cache
    def finished(method: str) -> Run:
        out = tmp_path_factory.mktemp(method)
        config = SMALL.replace(method=method, **SETTINGS[method])
        return run(config, out=out, progress=False)

    return finished


@pytest.fixture
def unknown_metrics(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of metrics that runs recorded without knowing them from their method."""
    names: list[str] = []
    pool = AdmittedMetrics._pool

    def noted(self: AdmittedMetrics, name: str) -> set[str]:
        if name not in self._known:
            names.append(name)
        return pool(self, name)

    monkeypatch.setattr(AdmittedMetrics, "_pool", noted)
    return names
