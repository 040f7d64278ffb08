"""Which clients' uploads can be stacked into one Jacobian, and the stack in an order of its own."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from ..errors import BadReply, NotEnoughMemory
from ..memory import require_memory
from .jacobian_upload import JacobianUpload

__all__ = ["MemoryBudget", "screen_uploads"]

OUTLIER = 100  # times the median client's root mean square
COPIES = 3  # of a round's rows: as they came, stacked, and in another order


class MemoryBudget:
    """Counts what the uploads of a round will take together; each alone might fit.

    A tensor most of whose numbers were dropped takes memory when it is first touched, not when it
    is decoded.
    """

    def __init__(self) -> None:
        self._held = 0

    def hold(self, upload: JacobianUpload) -> JacobianUpload:
        """Return the upload if it fits beside those before it.

        Raises
        ------
        BadReply
            With the reason ``"memory"``.
        """
        try:
            require_memory(
                COPIES * (self._held + upload.jacobian.nbytes), "the round's Jacobian with this one"
            )
        except NotEnoughMemory as error:
            raise BadReply("memory", str(error)) from None
        self._held += upload.jacobian.nbytes
        return upload


def screen_uploads(uploads: Sequence[JacobianUpload]) -> list[BadReply | None]:
    """Say of each client's upload why it cannot be stacked with the others', or None.

    Jacobians must have one form: the most common; of equally common ones, the first. With three
    clients or more, those whose rows or outputs are over 100 times larger than the median client's
    are left out: one would set the kernel's largest eigenvalue or the solver's measure of error,
    and so the cost and precision of all. Root mean squares are compared; outputs up to 100 pass in
    any case. Of two clients neither is the outlier.

    Parameters
    ----------
    uploads : sequence of JacobianUpload
        One a client, checked.

    Returns
    -------
    list of BadReply or None
        With the reason ``"layout"`` or ``"scale"``.
    """
    verdicts: list[BadReply | None] = []
    sizes: list[tuple[float, float]] = []
    for upload in uploads:
        row = float(upload.jacobian.squared_norms().mean())
        output = float(upload.outputs.double().square().mean())
        finite = math.isfinite(row + output)
        sizes.append((row, output))
        verdicts.append(
            None if finite else BadReply("scale", "its Jacobian or its outputs have no finite norm")
        )
    forms = [
        upload.jacobian.form if verdict is None else None
        for upload, verdict in zip(uploads, verdicts, strict=True)
    ]
    common = Counter(form for form in forms if form is not None).most_common(1)
    for i, form in enumerate(forms):
        if form is not None and form != common[0][0]:
            verdicts[i] = BadReply("layout", "its Jacobian has not the form of most replies'")
    left = [i for i, verdict in enumerate(verdicts) if verdict is None]
    if len(left) >= 3:
        row_limit = OUTLIER**2 * statistics.median_low(sizes[i][0] for i in left)
        output_limit = OUTLIER**2 * max(1.0, statistics.median_low(sizes[i][1] for i in left))
        for i in left:
            row, output = sizes[i]
            if (row > row_limit > 0) or output > output_limit:
                verdicts[i] = BadReply("scale", "100 times larger than the median client's")
    return verdicts
