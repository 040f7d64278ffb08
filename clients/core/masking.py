"""What clients share that send masked numbers: settings, keys, and a memory of what they gave.

The difference of two sums over different clients is what one client sent, whatever the masks. So a
client remembers what it has given sums of, and gives a second one only if its owner allows it.
"""

import contextlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from fedntk.ntk.options import Declared, argument
from fedntk.ntk.support.files import claimed, whole
from fedntk.trust import ParcelKeys
from fedntk.trust.secure_sum import FEWEST

from .adapter import CLIENT_ID
from .disk_store import cache_dir, client_folder, make_private, remove_stale
from .secure_sum import SecureSum, load_or_draw_key

Arrays = Mapping[str, NDArray[Any]]
Noted = dict[str, Any]  # of a sum: its run, whether it is spent, and what note_sum returns
Given = dict[str, Noted]


class Masking(Declared):
    """A client's part in secure sums: see :mod:`fedntk.clients.core.secure_sum`."""

    cache_name: ClassVar[str] = "sums"  # of the default folder

    cache: Path | str | None = argument(
        "folder for what clients keep. A client's folder in it has one for each run, and a file "
        "given.json, which says for all runs what it has given masked sums of. By default one in "
        "fedntk in $XDG_CACHE_HOME or ~/.cache",
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
    allow_repeats: bool = argument(
        "whether a client with only_masked gives a second sum over its examples, in whatever run, "
        "or of its weights in one round: a server that opens two sums over different clients has "
        "their difference. A sum that stayed closed counts unless enough clients gave it up",
        default=False,
    )
    liars_expected: int = argument(
        "clients who may say that they gave a sum up, and help to open it", default=1
    )
    fewest_clients: int = argument(
        "fewest clients with whom a sum may open that this client takes part in", default=FEWEST
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
        return self.only_masked or bool(getattr(super(), "is_private", False))

    def require_masked(self, step: str, masked: Iterable[str]) -> None:
        """Refuse a step that is none of a secure sum, if the client sends only masked sums."""
        if self.only_masked and step not in masked:
            raise ValueError(
                f"this client sends only masked sums, and was asked for {step}; have the "
                "strategy set secure_aggregation, or make the client without only_masked"
            )

    @abstractmethod
    def note_sum(self, given: Given, task: Any, config: Mapping[str, Any]) -> Noted:
        """Return what to note of the sum that a message asks for; ValueError if it is too many."""

    def reserve(self, name: str, task: Any, config: Mapping[str, Any]) -> None:
        """Add a sum to those given, as it may open; `name` is its exchange, in hex."""
        with self.given(task, config) as given:
            noted = self.note_sum(given, task, config)
            given[name] = {"run": task.run_key, "spent": False, **noted}

    def spend(self, name: str, task: Any, config: Mapping[str, Any]) -> None:
        """Note that the client helped to open a sum, for good."""
        with self.given(task, config) as given:
            given[name]["spent"] = True

    def free(self, name: str, task: Any, config: Mapping[str, Any]) -> None:
        """Forget a sum that can never open."""
        with self.given(task, config) as given:
            if not given.get(name, {"spent": True})["spent"]:
                del given[name]

    @contextlib.contextmanager
    def given(self, task: Any, config: Mapping[str, Any]) -> Iterator[Given]:
        """Yield what sums the client has given; changes are kept."""
        folder = self.folder(task, config, "-secure")
        path = folder.with_name("given.json")
        with claimed(folder.parent, path.stem):
            given: Given = json.loads(path.read_bytes()) if path.exists() else {}
            yield given
            with whole(path) as file:
                file.write(json.dumps(given).encode())

    def refuse_repeat(self, *, repeated: bool) -> None:
        """Refuse a sum of what the client has given a sum of, unless its owner allows it."""
        if repeated and self.only_masked and not self.allow_repeats:
            raise ValueError(
                "this client has given a sum of the same data before, and the difference of two "
                "sums over different clients is what one of them sent; only its owner can allow "
                "another, with allow_repeats"
            )

    def answer_sum(
        self, step: str, task: Any, records: Mapping[str, Arrays], config: Any
    ) -> Arrays:
        """Return what a secure sum needs before and after the numbers themselves."""
        if step in ("public-key", "shares"):
            with self.given(task, config) as given:
                self.note_sum(given, task, config)
        own = self.secure_sum(task, config)
        if step == "public-key":
            return own.public_key()
        answers = {"shares": own.shares, "reveal": own.reveal, "free": own.free}
        answer = answers.get(step, own.confirm)(message := records["secure-sum"])
        if note := {"reveal": self.spend, "free": self.free}.get(step):
            note(message["exchange"].tobytes().hex(), task, config)
        return answer

    def mask_words(
        self, words: NDArray[Any], about: bytes, message: Arrays, task: Any, config: Any
    ) -> Arrays:
        """Return masked words, once it is on the disk that the client gives a sum of them."""
        masked = self.secure_sum(task, config).mask(message, words, about)
        self.reserve(message["exchange"].tobytes().hex(), task, config)
        return {"masked": masked}

    def secure_sum(self, task: Any, config: Mapping[str, Any]) -> SecureSum:
        """Return the client's part in the sums of a run."""
        folder = self.folder(task, config, "-secure")
        keys = self.parcel_keys or ParcelKeys(load_or_draw_key(folder))
        return SecureSum(folder, keys, self.fewest_clients, self.liars_expected)
