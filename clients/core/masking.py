"""What clients share that send masked numbers: settings, keys, and what their owner allows.

The difference of two sums over different clients is what one client sent, whatever the masks. So a
client remembers, in its owner's ledger, what it has given sums of, and gives a second one only if
the owner allows it.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from fedntk.ntk.options import Declared, argument
from fedntk.trust import ParcelKeys

from .adapter import CLIENT_ID
from .disk_store import cache_dir, client_folder, make_private, remove_stale
from .privacy_ledger import NEW, PrivacyLimits, Release
from .secure_sum import SecureSum, load_or_draw_key

Arrays = Mapping[str, NDArray[Any]]


class Masking(Declared):
    """A client's part in secure sums: see :mod:`fedntk.clients.core.secure_sum`."""

    cache_name: ClassVar[str] = "sums"  # of the default folder

    cache: Path | str | None = argument(
        "folder for what clients keep during a run: a client's folder in it has one for each run. "
        "By default one in fedntk in $XDG_CACHE_HOME or ~/.cache",
        default=None,
    )
    parcel_keys: ParcelKeys | None = argument(
        "the client's key pair for secure_aggregation, and who vouches for the others' public "
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

    def folder(self, task: Any, config: Mapping[str, Any], ending: str = "") -> Path:
        """Return the folder of what this client keeps in a run; with a new one stale ones go.

        Its name has the client's id in the federation, or its seed if the message does not come
        through :func:`~fedntk.clients.client_app`.
        """
        cache = cache_dir() / self.cache_name if self.cache is None else Path(self.cache)
        folder = client_folder(cache, task.run_key, self._name(config) + ending)
        if not folder.exists():
            remove_stale(folder)
            make_private(folder)
        return folder

    def _name(self, config: Mapping[str, Any]) -> str:
        return str(config.get(CLIENT_ID, "-".join(map(str, getattr(self, "seed", ())))))

    @property
    def is_private(self) -> bool:
        """Whether the client sends only masked sums, or is private for another reason."""
        promises = self.only_masked or self.privacy is not None
        return promises or bool(getattr(super(), "is_private", False))

    def require_masked(self, step: str, masked: Iterable[str], *, noisy: bool = False) -> None:
        """Refuse a step that is none of a secure sum, nor noisy, if the client promises that."""
        if step not in masked and (self.only_masked or (self.privacy is not None and not noisy)):
            raise ValueError(
                f"this client sends only masked sums, and was asked for {step}; have the "
                "strategy set secure_aggregation, or make the client without only_masked, and "
                "without privacy if the sums have no noise"
            )

    @abstractmethod
    def release_of(self, task: Any, config: Mapping[str, Any]) -> Release:
        """Return what the sum that a message asks for would give away."""

    def owned_examples(self, task: Any) -> Any:
        """Return the examples (n, ...) that a sum is of; None: all that the owner has."""
        return None

    def reserve(self, exchange: str, task: Any, config: Mapping[str, Any]) -> None:
        """Put a sum into the owner's ledger, or, without an exchange, only ask whether it may be.

        ValueError if that is beyond what the owner allows.
        """
        promises = self.only_masked or self.privacy is not None
        repeats = not promises if self.allow_repeats is None else self.allow_repeats
        release = self.release_of(task, config)._replace(exchange=exchange)
        if self.privacy is not None:
            self.privacy.reserve(release, task, self.owned_examples(task), repeats=repeats)
        elif not repeats:
            raise ValueError(
                "privacy: sums that are masked or have noise are remembered in a ledger of the "
                f"data's owner, and this client has none; make one with {NEW}, if the data gave "
                "nothing before, and set privacy=PrivacyLimits(ledger=PATH), or privacy-ledger in "
                "the node config of fedntk's app; simulations set allow_repeats"
            )

    def answer_sum(
        self, step: str, task: Any, records: Mapping[str, Arrays], config: Any
    ) -> Arrays:
        """Return what a secure sum needs before and after the numbers themselves."""
        if step in ("public-key", "shares"):
            self.reserve("", task, config)
        own = self.secure_sum(task, config)
        if step == "public-key":
            return own.public_key()
        answers = {"shares": own.shares, "reveal": own.reveal, "free": own.free}
        message, settles = records["secure-sum"], step in ("reveal", "free")
        name = own.name(message) if settles else ""
        answer = answers.get(step, own.confirm)(message)
        if self.privacy is not None and settles:
            self.privacy.settle(name, opened=step == "reveal")
        return answer

    def mask_words(
        self, words: NDArray[Any], about: bytes, message: Arrays, task: Any, config: Any
    ) -> Arrays:
        """Return masked words, once the ledger says that the client gives a sum of them."""
        own = self.secure_sum(task, config)
        masked = own.mask(message, words, about)
        self.reserve(own.name(message), task, config)
        return {"masked": masked}

    def secure_sum(self, task: Any, config: Mapping[str, Any]) -> SecureSum:
        """Return the client's part in the sums of a run."""
        folder = self.folder(task, config, "-secure")
        keys = self.parcel_keys or ParcelKeys(load_or_draw_key(folder))
        if self.privacy is None:
            return SecureSum(folder, keys)
        return SecureSum(folder, keys, self.privacy.fewest_clients, self.privacy.liars_expected)
