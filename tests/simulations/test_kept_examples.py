"""Examples that are kept between messages: no more than fit, and the bits of new ones."""

import torch

from fedntk.simulations import run
from fedntk.simulations.data.kept_examples import KeptExamples, Own

from .outcomes import outcome
from .settings import SMALL


def examples(size: int) -> Own:
    """Return 4 `size` bytes of examples, and empty labels."""
    empty = torch.zeros(0)
    return Own((torch.zeros(size), empty), (empty, empty))


def test_no_more_is_kept_than_fits_and_the_oldest_goes_first():
    """Of 40 bytes each, 2 replaces 1, asked for longest ago; 3 has 104 bytes."""
    kept, made = KeptExamples(most_bytes=100), []
    for partition, size in ((0, 10), (1, 10), (0, 10), (2, 10), (0, 10), (1, 10), (3, 26), (3, 26)):
        kept.of(partition, lambda own=(partition, size): made.append(own[0]) or examples(own[1]))
        assert kept.nbytes <= 100
    assert made == [0, 1, 2, 1, 3, 3]


def test_kept_examples_make_the_bits_of_new_ones(tmp_path, monkeypatch):
    """The network that halves what it is given would evaluate on quarters the second time."""
    every = {"clients_per_round": 6, "clients_per_evaluation": 6, "local_test_fraction": 0.2}
    config = SMALL.replace(
        method="fedavg", model="tests.simulations.networks:halving", num_clients=6,
        min_partition_size=5, **every,
    )  # fmt: skip
    kept = run(config, out=tmp_path / "kept", progress=False)
    monkeypatch.setattr(KeptExamples, "of", lambda self, partition, make: make())
    assert outcome(run(config, out=tmp_path / "new", progress=False).folder) == outcome(kept.folder)
