"""What the owner of a data set allows its clients, and the memory of what they have given.

Both are the owner's: a server, a run or a node's id neither names nor sets them. Epsilons and
deltas add up: Dwork and Roth, *The Algorithmic Foundations of Differential Privacy*, theorem 3.16.
"""

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from fedntk.ntk.features.fixed_point import MOST_BITS
from fedntk.ntk.options import Declared, argument, option
from fedntk.ntk.support.files import DamagedFile, claimed, whole_path
from fedntk.trust.sealing import write_secret
from fedntk.trust.secure_sum import FEWEST

NEW = "fedntk privacy-ledger --new PATH"
WAIT = 60.0  # seconds for another client at the same ledger


class Release(NamedTuple):
    """One sum that may be known, of data that share an example with the set `examples`; "": all.

    Sums of weights have a round; epsilon is infinite without noise.
    """

    run: str
    epsilon: float = math.inf
    delta: float = 0.0
    server_round: int = 0
    exchange: str = ""
    examples: str = ""
    spent: bool = False


class PrivacyLedger:
    """A file with all that the examples of one data set have given; clients with parts share it.

    It has checksums of the examples, keyed by a secret. A release counts against data that share
    any example with its own, so added, reordered or otherwise dealt rows are no fresh data. Only
    :meth:`create` makes it: FileNotFoundError if it is missing, DamagedFile if damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()

    @classmethod
    def create(cls, path: str | Path, examples: Any = None) -> Self:
        """Make the ledger of data that gave nothing yet: `examples` (n, ...), or the first ones."""
        made, key = cls(path), secrets.token_hex(32)
        write_secret(made.path, json.dumps([key, _checksums(key, examples), []]).encode())
        return made

    def releases(self) -> list[Release]:
        """Return what was given, the oldest first."""
        with self._content() as (_, _, releases):
            return list(releases)

    def reserve(
        self, release: Release, examples: Any, allow: Callable[[Sequence[Release]], None]
    ) -> None:
        """Write down a release before it leaves the client; without an exchange, only ask for it.

        It is of `examples` (n, ...); None: of all. `allow` raises an error if it may not come after
        those that count. ValueError if the ledger is of other data.
        """
        with self._content() as (key, sets, releases):
            checksums = _checksums(key, examples)
            rows = set[str]().union(*checksums.values())
            shared = {name for name, others in sets.items() if not rows.isdisjoint(others)}
            if rows and sets and not shared:
                raise ValueError(
                    f"privacy ledger {self.path}: it is of other examples than this client's; name "
                    "theirs; if only a schema, or how cells are read, has changed, undo that, as a "
                    f"new ledger forgets what they gave; if they gave nothing, make one with {NEW}"
                )
            release = release._replace(examples="".join(checksums))
            if release not in releases:
                allow([r for r in releases if r.examples in {"", *shared} or not rows])
                if release.exchange:
                    releases.append(release)
                    sets.update(checksums)

    def settle(self, exchange: str, *, opened: bool) -> None:
        """Write down that a sum may have opened; or take it out, unless it may have before."""
        with self._content() as (_, _, releases):
            spent = [r for r in releases if r.exchange == exchange and (opened or r.spent)]
            if opened and not spent:
                raise ValueError(f"privacy ledger {self.path}: it has no sum that was to be opened")
            releases[:] = [r for r in releases if r.exchange != exchange]
            releases += [r._replace(spent=True) for r in spent]

    @contextlib.contextmanager
    def _content(self) -> Iterator[tuple[str, dict[str, list[str]], list[Release]]]:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"privacy ledger {self.path}: there is no such file; bring it back, or, only if "
                f"the data gave nothing before, make one with {NEW}"
            )
        if self.path.stat().st_nlink > 1:  # the others would become old copies
            raise ValueError(f"privacy ledger {self.path}: expected one name, got hard links")
        with claimed(self.path.parent, self.path.name, seconds=WAIT):
            before = self.path.read_bytes()
            try:
                key, sets, rows = json.loads(before)
                content = key, dict(sets), [Release(*row) for row in rows]
            except (ValueError, TypeError) as error:
                text = f"privacy ledger {self.path}: damaged ({error}); bring back a copy"
                raise DamagedFile(text) from error
            yield content
            after = json.dumps(content).encode()
            if after != before:
                with whole_path(self.path) as partial:
                    write_secret(partial, after)


class PrivacyLimits(Declared, frozen=True):
    """What the owner of a client's data allows; the client refuses sums beyond it.

    Without `only_masked` it also gives sums to which a trusted server adds noise.
    """

    ledger: str | Path = argument("file of the PrivacyLedger that the owner has made")
    epsilon: float = option(
        "largest epsilon over all runs; inf: one sum", default=math.inf, above=0, at_most=math.inf
    )
    delta: float = option("largest delta, added up likewise", default=1e-5, above=0, below=1)
    fewest_clients: int = option("fewest clients that open a masked sum", default=FEWEST)
    least_colluding: int = option("least colluding of masked noise", default=0)
    most_radius: int = option("largest radius of sums with noise", default=10**4)
    malicious: int = option(
        "clients who may say that they gave a closed sum up, and help to open it", default=1
    )
    most_bits: int = option("most bits of numbers in such and masked sums", default=MOST_BITS)
    examples: Any = argument(
        "the examples (n, ...) before they were standardised, for the ledger", default=None
    )

    def settle(self, exchange: str, *, opened: bool) -> None:
        """Write down in the ledger what became of a masked sum."""
        PrivacyLedger(self.ledger).settle(exchange, opened=opened)

    def reserve(self, release: Release, task: Any, examples: Any, *, repeats: bool) -> None:
        """Put a sum into the ledger; ValueError beyond the limits, or if it `repeats` one."""
        self._require("most_bits", getattr(task, "bits", 0) <= self.most_bits, task)
        if release.epsilon < math.inf:
            self._require("most_radius", task.radius <= self.most_radius, task)
            if task.step != "statistics":  # a trusted server's noise has one share
                self._require("least_colluding", task.colluding >= self.least_colluding, task)

        def allow(earlier: Sequence[Release]) -> None:
            everything = [*earlier, release]
            total = [
                math.fsum(r.epsilon for r in everything),
                math.fsum(r.delta for r in everything),
            ]
            limits = [self.epsilon, self.delta]
            within = all(n <= (1 + 1e-9) * limit for n, limit in zip(total, limits, strict=True))
            if self.epsilon < math.inf and not within:
                raise ValueError(
                    f"privacy: this client's sums would have epsilon and delta of {total} in all "
                    f"runs, and its owner allows {limits}, and can raise that"
                )
            if self.epsilon == math.inf and not repeats and _repeats(release, earlier):
                raise ValueError(
                    "this client has given a sum of the same data before, and two sums tell what "
                    "one client sent; only its owner can allow another, with allow_repeats"
                )

        rows = examples if self.examples is None else self.examples
        PrivacyLedger(self.ledger).reserve(release, rows, allow)

    def _require(self, name: str, holds: bool, task: Any) -> None:
        if not holds:
            value = getattr(task, name.partition("_")[2])
            raise ValueError(
                f"{name}: this client's owner allows {getattr(self, name)}, and the server asks "
                f"for {value}; change the strategy's, or have the owner change the limit"
            )


def _repeats(release: Release, earlier: Sequence[Release]) -> bool:
    """Whether a release is of the same numbers as one before; sums of weights have a round."""
    if not release.server_round:
        return any(not r.server_round for r in earlier)
    return any(r.run == release.run and r.server_round >= release.server_round for r in earlier)


def _checksums(key: str, examples: Any) -> dict[str, list[str]]:
    """Return set name -> checksums of examples, keyed so that no one else can look for one."""
    if examples is None:
        return {}
    x = np.asarray(examples)
    x = x.astype(np.float32) if x.dtype.kind == "f" else x
    dtype = "UTF-8" if x.dtype.kind == "S" else x.dtype  # whatever the longest one's length
    kind, secret = f"{dtype} {x.shape[1:]} ".encode(), bytes.fromhex(key)
    rows = (hashlib.blake2b(kind + row.tobytes(), digest_size=8, key=secret) for row in x)
    checksums = sorted({row.hexdigest() for row in rows})
    return {hashlib.blake2b("".join(checksums).encode(), digest_size=8).hexdigest(): checksums}
