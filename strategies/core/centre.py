"""Inputs centred by their mean over all clients, which these are asked for before the first round.

Each client sends the sum of its inputs, projected if there is a projection, and their number;
the server sees both.
"""

from collections.abc import Sequence
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import weighted_mean
from fedntk.ntk.features.centred_inputs import CENTRE, INPUT_SUMS
from fedntk.ntk.options import Declared, state
from fedntk.ntk.payloads.screening import screen_sizes
from fedntk.ntk.support.arrays import require_array

from .channel import Rounds
from .replies import LARGEST_WEIGHT, NoUsableReply, Reply

logger = getLogger("flwr")
STAGE = "query.input_sums"
Round = Any  # that of round.py, which imports this file
Strategy = Any
Mean = tuple[NDArray[np.float64], int]  # of a client's inputs, and of how many


class CentreInputs(Declared):
    """Before the first round all clients are asked for the sum of their inputs.

    The model's array 'centre' becomes the mean, for a model that is a
    :class:`fedntk.ntk.CentredInputs`. More than half of the clients must answer.
    """

    done: bool = state(bool)  # whether the weights that belong to the state have their mean

    def centred(self, r: Round) -> Rounds[ArrayRecord]:
        """Return the model's arrays with the mean over all inputs; `r` is a round 0 of STAGE."""
        arrays: ArrayRecord = r.arrays
        strategy = r.strategy
        if self.done:
            return arrays
        if CENTRE not in arrays:
            raise ValueError(
                f"centre: expected the array {CENTRE!r} in the model, got {list(arrays)[:5]}; "
                "wrap the network as CentredInputs(network, input_shape), also on the clients"
            )
        centre = arrays[CENTRE].numpy()
        sample = r.sample()
        uploads = yield from r.ask(
            lambda reply: _parse_mean(reply, centre), clients=sample, arrays=ArrayRecord()
        )
        uploads = strategy.screening.drop(uploads, _screen)
        if not strategy.enough(uploads) or 2 * len(uploads) <= len(sample.nodes):
            raise NoUsableReply(
                f"centre: {len(uploads)} of {len(sample.nodes)} clients gave a sum of inputs that "
                "can be used, and more than half must; start again when they are there, or leave "
                f"centre out; the last refused: {r.channel.last_refusal or 'none came at all'}"
            )
        means, counts = zip(*(({CENTRE: mean}, n) for mean, n in uploads.values), strict=True)
        logger.info("inputs are centred by the mean of %d examples", sum(counts))
        mean = weighted_mean(means, counts)[CENTRE].astype(centre.dtype)
        self.done = True
        return ArrayRecord({**arrays, CENTRE: Array(mean)})


def untrained_by(strategy: Strategy) -> tuple[str, ...]:
    """Return the names of the model's arrays that clients must return as they were sent."""
    return () if strategy.part_of(CentreInputs) is None else (CENTRE,)


def _parse_mean(reply: Reply, centre: NDArray[Any]) -> Mean:
    (sums,), count = reply.ordered_arrays(INPUT_SUMS), reply.num_examples
    limit = count * min(LARGEST_WEIGHT, float(np.finfo(centre.dtype).max))
    require_array(INPUT_SUMS, sums, shape=centre.shape, dtype=np.float64, limit=limit)
    return sums / count, count


def _screen(means: Sequence[Mean], factor: float) -> list[BadReply | None]:
    """Refuse what would outweigh all others: a mean far out, or one of too many examples."""
    of_means = screen_sizes([float(np.linalg.norm(mean)) for mean, _ in means], factor)
    of_counts = screen_sizes([float(count) for _, count in means], factor)
    return [a or b for a, b in zip(of_means, of_counts, strict=True)]
