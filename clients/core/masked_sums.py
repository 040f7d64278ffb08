"""A client's masked numbers: where it keeps its secrets, its keys, and what its owner allows.

The difference of two sums over different clients is what one client sent, whatever the masks. So a
client remembers, in its owner's ledger, what it has given sums of, and gives a second one only if
the owner allows it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from fedntk.ntk.options import Declared, argument
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.feature_statistics import SECURE_STEPS
from fedntk.trust import ParcelKeys

from .disk_store import client_folder, make_folder
from .privacy_ledger import NEW, PrivacyLimits, Release
from .secure_sum import SecureSum, load_or_draw_key

Arrays = Mapping[str, NDArray[Any]]


class SumRequest(NamedTuple):
    """What a message asks of one client of a sum."""

    task: Any  # what the server asks for; its `run_key` names the run
    client: str  # names the client's folder
    release: Release  # what the sum would give away
    examples: Any = None  # (n, ...), of which the sum is; None: of all that the owner has


class MaskedSums(Declared, frozen=True):
    """A client's part in secure sums: see :mod:`fedntk.clients.core.secure_sum`."""

    cache: Path | str | None = argument(
        "folder for the secrets of a sum: a client's folder in it has one for each run. By default "
        "fedntk/sums in $XDG_CACHE_HOME or ~/.cache",
        default=None,
    )
    parcel_keys: ParcelKeys | None = argument(
        "the client's key pair for secure aggregation, and who vouches for the others' public "
        "keys; by default it draws a key for the run, and keeps it beside the cache's folders",
        default=None,
    )
    only_masked: bool = argument(
        "whether the client sends nothing about its features except masked sums: no other sums, "
        "moments, counts or features, and no model from which they could be computed. Nor does it "
        "evaluate such models on its training examples, or give a second sum: see allow_repeats",
        default=False,
    )
    allow_repeats: bool | None = argument(
        "whether the client gives a second exact sum over its examples, in whatever run, or of its "
        "weights in one round: the difference of two sums over different clients is what one sent. "
        "None: unless it has only_masked or privacy. False: not even a first one without privacy",
        default=None,
    )
    privacy: PrivacyLimits | None = argument(
        "what the owner of its data allows, and the ledger of what they gave; None: the client "
        "remembers nothing, so it refuses sums unless it may repeat them",
        default=None,
    )

    @property
    def is_private(self) -> bool:
        """Whether the client promises to send only masked sums, or sums with noise."""
        return self.only_masked or self.privacy is not None

    def require_masked(
        self, step: str, permitted: Collection[str] = SECURE_STEPS, *, noisy: bool = False
    ) -> None:
        """Refuse a step that is none of a secure sum, nor noisy, if the client promises that."""
        if step not in permitted and (self.only_masked or (self.privacy is not None and not noisy)):
            raise ValueError(
                f"this client sends only masked sums, and was asked for {step}; have the "
                "strategy set secure_aggregation, or make the client without only_masked, and "
                "without privacy if the sums have no noise"
            )

    def reserve(self, request: SumRequest, exchange: str = "") -> None:
        """Put a sum into the owner's ledger, or, without an exchange, only ask whether it may be.

        ValueError if that is beyond what the owner allows.
        """
        repeats = not self.is_private if self.allow_repeats is None else self.allow_repeats
        release = request.release._replace(exchange=exchange)
        if self.privacy is not None:
            self.privacy.reserve(release, request.task, request.examples, repeats=repeats)
        elif not repeats:
            raise ValueError(
                "privacy: sums that are masked or have noise are remembered in a ledger of the "
                f"data's owner, and this client has none; make one with {NEW}, if the data gave "
                "nothing before, and set privacy=PrivacyLimits(ledger=PATH), or privacy-ledger in "
                "the node config of fedntk's app; simulations set allow_repeats"
            )

    def answers(self, step: str) -> bool:
        """Whether the step is one before or after the numbers themselves."""
        return step in SECURE_STEPS and step != "masked"

    def answer(self, step: str, request: SumRequest, message: Arrays) -> Arrays:
        """Answer such a step of a sum; `message` is its record ``secure-sum``."""
        if step in ("public-key", "shares"):
            self.reserve(request)
        secure_sum = self.secure_sum(request)
        if step == "public-key":
            return secure_sum.public_key()
        if step == "shares":
            return secure_sum.shares(message)
        if step in ("confirm", "void"):
            return secure_sum.confirm(message)
        name, opened = secure_sum.name(message), step == "reveal"
        reply = secure_sum.reveal(message) if opened else secure_sum.free(message)
        if self.privacy is not None:
            self.privacy.settle(name, opened=opened)
        return reply

    def mask(
        self, words: NDArray[Any], about: bytes, request: SumRequest, message: Arrays
    ) -> Arrays:
        """Return masked words, once the ledger says that the client gives a sum of them."""
        secure_sum = self.secure_sum(request)
        masked = secure_sum.mask(message, words, about)
        self.reserve(request, secure_sum.name(message))
        return {wire.MASKED: masked}

    def secure_sum(self, request: SumRequest) -> SecureSum:
        """Return the client's part in the sums of a run."""
        client = f"{request.client}-secure"
        folder = make_folder(client_folder(self.cache, "sums", request.task.run_key, client))
        keys = self.parcel_keys or ParcelKeys(load_or_draw_key(folder))
        if self.privacy is None:
            return SecureSum(folder, keys)
        return SecureSum(folder, keys, self.privacy.fewest_clients, self.privacy.malicious)
