"""Screening of clients' replies, and the rule by which their models become one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from flwr.app import ArrayRecord

from fedntk.ntk import BadReply
from fedntk.ntk.options import Declared, argument, option
from fedntk.ntk.payloads.screening import OUTLIER_FACTOR, screen_changes
from fedntk.ntk.robust_averages import Defence, least_models, robust_mean, screen_by_loss
from fedntk.ntk.support.arrays import ArrayDict, Arrays

from .averaging import cast_like
from .uploads import Uploads

T = TypeVar("T")
Rule = Callable[[Sequence[T], float], Sequence[BadReply | None]]


class Screening(Declared):
    """How malicious replies are found and borne: see :mod:`fedntk.ntk.robust_averages`.

    Examples
    --------
    >>> screening = Screening(rule="median", malicious=2)
    >>> screening.fewest
    5
    """

    rule: Defence = option(
        "aggregation rule by which clients' models become one, so that few malicious ones move it "
        "little: see fedntk.ntk.robust_averages; some rules count clients alike, as numbers of "
        "examples are claims",
        default="none",
        kw_only=False,
    )
    malicious: int = option(
        "f: most malicious clients in a round that the rule has to bear; rounds with too few "
        "replies for so many leave the model unchanged",
        default=1,
        at_least=1,
    )
    outlier_factor: float = option(
        "with three clients or more, a reply is dropped if its change of the weights, or what else "
        "a method compares, is this many times the median client's or more; raise it if clients "
        "take very different numbers of steps; infinity drops none",
        default=OUTLIER_FACTOR,
        above=1,
        at_most=float("inf"),
    )
    validation_loss: Callable[[ArrayRecord], float] | None = argument(
        "the network's loss on the server's validation examples, for rule='validation' and "
        "NTK-FL's selection='validation'",
        default=None,
    )

    def check(self) -> None:
        """Refuse the rule that needs the server's loss without it."""
        if self.rule == "validation" and self.validation_loss is None:
            raise ValueError("validation_loss: expected one with rule='validation', got None")

    @property
    def is_robust(self) -> bool:
        """Whether false models are expected."""
        return self.rule != "none"

    @property
    def fewest(self) -> int:
        """Number of replies without which the rule cannot be followed."""
        return least_models(self.rule, self.malicious)

    def bears(self, uploads: Uploads[Any]) -> int:
        """Return how many replies were dropped as false by the rule, which still count as valid."""
        return uploads.rejected[self.rule]

    def drop(self, uploads: Uploads[T], rule: Rule[T]) -> Uploads[T]:
        """Drop the replies that a rule over all, and `outlier_factor`, refuses."""
        return uploads.judge(rule(uploads.values, self.outlier_factor))

    def drop_outliers(self, uploads: Uploads[ArrayDict], model: Arrays) -> Uploads[ArrayDict]:
        """Drop weights that moved much farther than most, or that raise the validation loss."""
        uploads = self.drop(uploads, partial(screen_changes, model))
        return self.drop_harmful(uploads, model, lambda weights: weights)

    def drop_harmful(
        self,
        uploads: Uploads[T],
        model: Arrays,
        weights: Callable[[T], Arrays],
        counts: Sequence[int] = (),
    ) -> Uploads[T]:
        """Drop the clients whose weights raise the validation loss, if that is the rule.

        They have some or all of the model's arrays, and count as their examples, or as `counts`.
        """
        loss = self.validation_loss
        if loss is None or self.rule != "validation" or not uploads:
            return uploads
        verdicts = screen_by_loss(
            [weights(value) for value in uploads.values],
            counts or uploads.counts,
            lambda arrays: loss(cast_like({**model, **arrays}, model)),
            self.malicious,
        )
        return uploads.judge(verdicts)

    def mean(self, uploads: Uploads[Any], before: Arrays, counts: Sequence[int] = ()) -> ArrayDict:
        """Return the mean of models by the rule.

        `before` is what they started from; they count as their examples, or as `counts`.
        """
        counts = counts or uploads.counts
        return robust_mean(before, uploads.values, counts, self.rule, self.malicious)
