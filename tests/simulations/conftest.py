"""Fixtures that tests of runs share."""

import functools
from collections.abc import Callable

import pytest

from fedntk.simulations import Run, run
from fedntk.simulations.engine import runs
from fedntk.simulations.engine.recorder import AdmittedMetrics

from .settings import small


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Callable[[str], Run]:
    """A finished run of a method, which tests only read; run once in each process of tests."""
    pool = AdmittedMetrics._pool

    def known(self: AdmittedMetrics, name: str) -> set[str]:
        assert name in self._known, f"{name} takes a place that is left for clients' metrics"
        return pool(self, name)

    @functools.cache
    def finished(method: str) -> Run:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AdmittedMetrics, "_pool", known)
            return run(small(method), out=tmp_path_factory.mktemp(method), progress=False)

    return finished


@pytest.fixture
def each_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have `begin` called with each configuration that is run, and `report` with it and a round."""
    train = runs.train

    def patch(begin=lambda config: None, report=lambda config, record: None) -> None:
        def trained(grid, setup, strategy, on_round, *, resume) -> None:
            def both(record) -> None:
                on_round(record)
                report(setup.config, record)

            begin(setup.config)
            train(grid, setup, strategy, both, resume=resume)

        monkeypatch.setattr(runs, "train", trained)

    return patch
