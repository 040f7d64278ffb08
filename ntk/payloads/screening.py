"""Choice of clients' uploads that can be used together: of one form, of one order of size.

With three clients or more, what is over `factor` times (100 by default) as large as the median
client's is dropped: one upload would otherwise decide the result, or its cost, for all. What is
false within the factor, or from more than half of the clients, is not detected. A verdict is None
or a BadReply, with the reason ``"scale"`` unless another is named.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..averages import change_size
from ..errors import BadReply, NotEnoughMemory
from ..support.memory import require_memory
from .uploads import JacobianUpload

OUTLIER_FACTOR = 100.0  # times the median client's
STRANGER_FACTOR = 3.0  # of a neighbour's distance or loss, times the median one, with a defence
COPIES = 3  # of a round's rows: as they came, stacked, and in another order


def _limit(sizes: Sequence[float], factor: float, floor: float = 0.0) -> float:
    if len(sizes) < 3:
        return math.inf
    return factor * max(floor, statistics.median_low(sizes)) or math.inf


def _too_large(reason: str, factor: float) -> BadReply:
    return BadReply(reason, f"over {factor:g} times as large as the median client's")


class MemoryBudget:
    """Counts the memory that the uploads of a round take together, decoded or not."""

    def __init__(self) -> None:
        self._held = 0

    def hold(self, upload: JacobianUpload) -> JacobianUpload:
        """Return the upload if it fits beside those before it, else raise BadReply ("memory")."""
        try:
            require_memory(
                COPIES * (self._held + upload.jacobian.nbytes), "the round's Jacobian with this one"
            )
        except NotEnoughMemory as error:
            raise BadReply("memory", str(error)) from None
        self._held += upload.jacobian.nbytes
        return upload


def screen_changes(
    before: Mapping[str, NDArray[Any]],
    clients: Sequence[Mapping[str, NDArray[Any]]],
    factor: float = OUTLIER_FACTOR,
) -> list[BadReply | None]:
    """Compare the norms of clients' changes of the weights `before`, over floating-point arrays."""
    return screen_sizes([change_size(before, model) for model in clients], factor)


def screen_sizes(sizes: Sequence[float], factor: float = OUTLIER_FACTOR) -> list[BadReply | None]:
    """Compare clients by one size each, at least 0."""
    limit = _limit(sizes, factor)
    return [_too_large("scale", factor) if size > limit else None for size in sizes]


def screen_distances(models: Sequence[Mapping[str, NDArray[Any]]]) -> list[BadReply | None]:
    """Drop models over three times as far from coordinates' medians as the median one."""
    centre = {name: np.median([model[name] for model in models], 0) for name in models[0]}
    return screen_sizes([change_size(centre, model) for model in models], STRANGER_FACTOR)


def screen_losses(
    losses: Sequence[NDArray[np.float64]], factor: float = OUTLIER_FACTOR
) -> list[BadReply | None]:
    """Compare clients' losses (T,) at the candidates; the reason is ``"losses"``.

    A client is dropped if at a candidate its loss is over `factor` times the median client's, and
    over `factor`. If most losses are infinite, none is dropped for it. A client within the limit
    can still decide which candidate has the lowest mean.
    """
    columns = zip(*losses, strict=True)
    limits = np.array([_limit(column, factor, floor=1.0) for column in columns])
    return [_too_large("losses", factor) if (client > limits).any() else None for client in losses]


def screen_strangers(losses: Sequence[float]) -> list[BadReply | None]:
    """Compare models by their losses on a client's examples; the first is its own, and stays.

    One is dropped if its loss is over 3 times the median one, and over 3: clients with other
    classes lose less. The reason is ``"leave-one-out"``.
    """
    limit = STRANGER_FACTOR * max(1.0, statistics.median_low(losses))
    bad = BadReply("leave-one-out", f"a loss over {limit:.3g} on the client's own examples")
    return [None, *(bad if loss > limit else None for loss in losses[1:])]


def screen_uploads(
    uploads: Sequence[JacobianUpload], factor: float = OUTLIER_FACTOR
) -> list[BadReply | None]:
    """Compare clients' Jacobians; the reason is ``"layout"`` or ``"scale"``.

    Jacobians must have one form: the most common, or the first of these. Rows and outputs are
    compared by their root mean squares: an outlier would set the kernel's largest eigenvalue or the
    solver's measure of error, so the cost and precision of all. Outputs up to `factor` pass.
    """
    verdicts: list[BadReply | None] = [None] * len(uploads)
    rows = [math.sqrt(float(upload.jacobian.squared_norms().mean())) for upload in uploads]
    outputs = [math.sqrt(float(upload.outputs.double().square().mean())) for upload in uploads]
    for i in range(len(uploads)):
        if not math.isfinite(rows[i] + outputs[i]):
            verdicts[i] = BadReply("scale", "its Jacobian or its outputs have no finite norm")
    forms = {i: upload.jacobian.form for i, upload in enumerate(uploads) if verdicts[i] is None}
    common = Counter(forms.values()).most_common(1)
    for i, form in forms.items():
        if form != common[0][0]:
            verdicts[i] = BadReply("layout", "its Jacobian lacks the form of most replies'")
    left = [i for i, verdict in enumerate(verdicts) if verdict is None]
    row_limit = _limit([rows[i] for i in left], factor)
    output_limit = _limit([outputs[i] for i in left], factor, floor=1.0)
    for i in left:
        if rows[i] > row_limit or outputs[i] > output_limit:
            verdicts[i] = _too_large("scale", factor)
    return verdicts
