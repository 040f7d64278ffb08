"""Inputs centred by their mean over all clients, which these are asked for before the first round.

Each client sends the sum of its inputs, projected if there is a projection, and their number;
the server sees both. The mean becomes an array of the model, which all clients are then sent.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import weighted_mean
from fedntk.ntk.features.centred_inputs import CENTRE, INPUT_SUMS
from fedntk.ntk.payloads.screening import screen_sizes
from fedntk.ntk.support.arrays import require_array

from .exchange import logger
from .replies import LARGEST_WEIGHT, NoUsableReply, Reply
from .sampling import Sampling

STAGE = "query.input_sums"
Mean = tuple[NDArray[np.float64], int]  # of a client's inputs, and of how many


def centre_by_clients(arrays: ArrayRecord, strategy: Sampling, grid: Grid) -> ArrayRecord:
    """Return the model's arrays with the mean over the inputs of all clients that may train.

    NoUsableReply if half of the clients or fewer gave a usable sum, or fewer than
    ``min_completed``.
    """
    if CENTRE not in arrays:
        raise ValueError(
            f"centre_inputs: expected the array {CENTRE!r} in the model, got {list(arrays)[:5]}; "
            "wrap the network as CentredInputs(network, input_shape), also on the clients"
        )
    centre = arrays[CENTRE].numpy()
    nodes = strategy.sample(grid, 0, STAGE, 1.0, strategy.fewest_replies, strategy.held_out)
    pairs, rejected = strategy.exchange(
        nodes, STAGE, ArrayRecord(), lambda reply: _parse_mean(reply, centre)
    )
    pairs = strategy.apply_screen(pairs, rejected, _screen)
    if not strategy.enough(len(pairs)) or 2 * len(pairs) <= len(nodes):
        raise NoUsableReply(
            f"centre_inputs: {len(pairs)} of {len(nodes)} clients gave a sum of inputs that can "
            "be used, and more than half must; start again when they are there, or leave "
            f"centre_inputs out; the last refused: {strategy.last_refusal or 'none came at all'}"
        )
    means, counts = zip(*(({CENTRE: mean}, count) for _, (mean, count) in pairs), strict=True)
    logger.info("inputs are centred by the mean of %d examples", sum(counts))
    mean = weighted_mean(means, counts)[CENTRE].astype(centre.dtype)
    return ArrayRecord({**arrays, CENTRE: Array(mean)})


def _parse_mean(reply: Reply, centre: NDArray[Any]) -> Mean:
    (sums,), count = reply.ordered_arrays(INPUT_SUMS), reply.num_examples
    limit = count * min(LARGEST_WEIGHT, float(np.finfo(centre.dtype).max))
    require_array(INPUT_SUMS, sums, shape=centre.shape, dtype=np.float64, limit=limit)
    return sums / count, count


def _screen(found: Sequence[Mean], factor: float) -> list[BadReply | None]:
    """Refuse what would outweigh all others: a mean far out, or one of too many examples."""
    of_means = screen_sizes([float(np.linalg.norm(mean)) for mean, _ in found], factor)
    of_counts = screen_sizes([float(count) for _, count in found], factor)
    return [a or b for a, b in zip(of_means, of_counts, strict=True)]
