"""Fixtures that tests of runs share."""

import functools
from collections.abc import Callable

import pytest

from fedntk.simulations import Run, run
from fedntk.simulations.engine import runs
from fedntk.simulations.engine.recorder import AdmittedMetrics

from .settings import SETTINGS, SMALL


def note_unknown_metrics(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which runs add each metric that their method does not name."""
    names: list[str] = []
    pool = AdmittedMetrics._pool

    def noted(self: AdmittedMetrics, name: str) -> set[str]:
        if name not in self._known:
            names.append(name)
        return pool(self, name)

    patch.setattr(AdmittedMetrics, "_pool", noted)
    return names


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Callable[[str], Run]:
    """A finished run of a method, which tests only read; run once in each process of tests."""

    @functools.cache
    def finished(method: str) -> Run:
        config = SMALL.replace(method=method, **SETTINGS[method])
        with pytest.MonkeyPatch.context() as patch:
            unknown = note_unknown_metrics(patch)
            result = run(config, out=tmp_path_factory.mktemp(method), progress=False)
        assert unknown == []  # no place is taken that is left for metrics which clients name
        return result

    return finished


@pytest.fixture
def each_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have `begin` called with each configuration that is run, and `report` with it and a round."""
    serve = runs.serve

    def patch(begin=lambda config: None, report=lambda config, record: None) -> None:
        def served(grid, config, on_round, prepared=None) -> None:
            def both(record) -> None:
                on_round(record)
                report(config, record)

            begin(config)
            serve(grid, config, both, prepared)

        monkeypatch.setattr(runs, "serve", served)

    return patch
