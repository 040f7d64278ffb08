"""Inputs centred by their mean over all clients, which these are asked for once.

Each client sends the sum of its inputs, projected where there is a projection, and their number;
the server sees both. The mean goes into an array of the model, which all clients are then sent.
"""

import logging
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.arrays import require_array
from fedntk.ntk.features import CENTRE, FEATURE_SUMS
from fedntk.ntk.payloads import screen_sizes

from .averaging import cast_like, named_arrays
from .replies import Reply

if TYPE_CHECKING:
    from .base import BaseStrategy

__all__ = ["FeatureCentre"]

logger = logging.getLogger("flwr")
STAGE = "query.feature_sums"


class FeatureCentre:
    """The mean of all clients' inputs, for a :class:`~fedntk.ntk.CentredInputs`.

    Attributes
    ----------
    mean : ndarray of float64, of one input's shape, or None
        None until clients have answered.
    """

    def __init__(self) -> None:
        self.mean: NDArray[np.float64] | None = None

    def put_into(self, arrays: ArrayRecord, strategy: "BaseStrategy", grid: Grid) -> ArrayRecord:
        """Return the arrays with the mean; the clients are asked for it if they were not yet.

        Where too few answer, the arrays stay as they are, and the next round asks again.

        Raises
        ------
        ValueError
            If the model has no such array.
        """
        model = named_arrays(arrays)
        if CENTRE not in model:
            raise ValueError(
                f"centre_features: expected the array {CENTRE!r} in the model, got "
                f"{list(model)[:5]}; wrap the network as CentredInputs(network, input_shape), on "
                "the clients, too"
            )
        centre = model[CENTRE]
        if self.mean is None:
            self.mean = self._asked(strategy, grid, centre.shape)
        if self.mean is None:
            return arrays
        own = cast_like({CENTRE: self.mean}, {CENTRE: centre})
        return ArrayRecord({**arrays, **own})

    def _asked(
        self, strategy: "BaseStrategy", grid: Grid, shape: tuple[int, ...]
    ) -> NDArray[np.float64] | None:
        nodes = strategy.sample(
            grid, strategy.server_round, STAGE, 1.0, strategy.min_completed, strategy.held_out
        )
        pairs, rejected = strategy.exchange(
            nodes, STAGE, ArrayRecord(), lambda reply: _checked_mean(reply, shape)
        )
        pairs = strategy.screened(pairs, rejected, _screen)
        if not strategy.enough(len(pairs)):
            logger.log(WARNING, "no mean of the inputs: they stay uncentred in this round")
            return None
        counts = [reply.num_examples for reply, _ in pairs]
        logger.log(INFO, "inputs are centred by the mean of %d examples", sum(counts))
        return np.average([mean for _, mean in pairs], axis=0, weights=counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean, as JSON holds it."""
        return {"centre": None if self.mean is None else self.mean.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        found = state["centre"]
        self.mean = None if found is None else np.array(found, np.float64)


def _checked_mean(reply: Reply, shape: tuple[int, ...]) -> NDArray[np.float64]:
    arrays = reply.arrays()
    if list(arrays) != [FEATURE_SUMS]:
        raise BadReply("arrays", f"expected {FEATURE_SUMS!r} alone, got {str(list(arrays))[:80]}")
    sums = arrays[FEATURE_SUMS]
    require_array(FEATURE_SUMS, sums, shape=shape, dtype=np.float64)
    return cast(NDArray[np.float64], sums / reply.num_examples)


def _screen(means: Sequence[NDArray[np.float64]], factor: float) -> list[BadReply | None]:
    return screen_sizes([float(np.linalg.norm(mean)) for mean in means], factor)
