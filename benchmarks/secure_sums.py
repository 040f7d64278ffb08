"""Seconds and bytes of a secure average of weights, by stage, for clients and numbers of a model.

    python benchmarks/secure_sums.py [--cases 10x8000,100x8000,...]

Each case has K clients with folders of their own on this disk, and a server, in one process and
without Flower. A number is a word of 64 bits. Stages are those of the protocol:

public-key  a client draws a nonce; the server's roster goes to all
shares      a client shares its secrets among all others
encode      a client makes whole numbers of its weights, from a normal change of each
masked      it adds its masks
confirm     it says who it was told is in the sum
reveal      it gives its shares
sum         the server adds up words
open        the server takes the masks out, if a tenth of the clients is lost after the shares

Clients' seconds are means over clients, of three clients for encode and masked if all would take
too long (the sum of all clients is then not compared); bytes are of one client's arrays. Elsewhere
the sum must be that of the numbers without masks, to the bit.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import keep_rows, parse_options

from fedntk.clients.core.secure_sum import SecureSum
from fedntk.ntk.payloads.masked_average import average_words
from fedntk.trust import MaskedSum, ParcelKeys, Promise, Roster, new_key
from fedntk.trust.secure_sum import exchange_of

CASES = ("10x8000", "10x1000000", "10x11000000", "100x8000", "100x1000000", "100x11000000")
MOST = 2 * 10**9  # words with masks, of all clients, that are made for a comparison
SHOWN = 3  # clients that are timed beyond it
Arrays = Mapping[str, np.ndarray]


def size(arrays: Arrays) -> int:
    return sum(np.asarray(array).nbytes for array in arrays.values())


class Stages:
    """Rows of one case."""

    def __init__(self, clients: int, numbers: int) -> None:
        self.case = {"clients": clients, "numbers": numbers}
        self.rows: list[dict[str, Any]] = []

    def time(self, stage: str, calls: list[Callable[[], Any]], down: int = 0) -> list[Any]:
        """Make calls, of one client each; keep their mean seconds and one client's bytes."""
        start = time.perf_counter()
        found = [call() for call in calls]
        seconds = (time.perf_counter() - start) / len(calls)
        up = size(found[0]) if isinstance(found[0], dict) else 0
        row = {**self.case, "stage": stage, "seconds": seconds, "down": down, "up": up}
        self.rows.append(row)
        print(row, flush=True)
        return found


def run(clients: int, numbers: int) -> list[dict[str, Any]]:
    stages, ids = Stages(clients, numbers), np.arange(clients)
    threshold = -(-2 * clients // 3)
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(k) for k in ids]
        for home in homes:
            home.mkdir()
        own = [SecureSum(home, ParcelKeys(new_key())) for home in homes]
        public = stages.time("public-key", [one.public_key for one in own])
        told = {
            "clients": ids,
            "keys": np.stack([p["public-key"] for p in public]),
            "nonces": np.stack([p["nonce"] for p in public]),
            "vouchers": np.zeros((clients, 0), np.uint8),
            "threshold": np.array(threshold),
        }
        shared = stages.time("shares", [lambda o=o: o.shares(told) for o in own], size(told))
        name = exchange_of(row.tobytes() for row in told["nonces"])
        common = {"exchange": np.frombuffer(name, np.uint8), "clients": ids}
        parcels = [{**common, "parcels": np.stack([s["parcels"][k] for s in shared])} for k in ids]
        rng = np.random.default_rng(0)
        model = {"w": rng.standard_normal(numbers, np.float32)}
        all_masked = clients**2 * numbers <= MOST
        shown = clients if all_masked else SHOWN

        def changed(client: int) -> Arrays:
            change = np.random.default_rng(client).standard_normal(numbers, np.float32)
            return {"w": model["w"] + 0.01 * change}

        def encode(weights: Arrays) -> np.ndarray:
            return average_words(model, weights, 600, 0.5)

        calls = [lambda w=w: encode(w) for w in map(changed, range(SHOWN))]
        stages.time("encode", calls)
        arrived = ids[: clients - max(1, clients // 10)]
        total, plain = np.zeros((2, numbers + 4), np.uint64)
        seconds, masked = [], np.empty(0, np.uint64)
        for k in range(shown):
            words = encode(changed(k))
            start = time.perf_counter()
            masked = own[k].mask(parcels[k], words, b"")
            seconds.append(time.perf_counter() - start)
            if k in arrived:
                total += masked
                plain += words
        for k in range(shown, clients):  # they take part without their words
            own[k].mask(parcels[k], words[:1], b"")
        row = {"seconds": float(np.mean(seconds)), "down": size(model) + size(parcels[0])}
        stages.rows.append({**stages.case, "stage": "masked", **row, "up": masked.nbytes})
        start = time.perf_counter()
        for _ in range(3):
            total += masked
        adding = (time.perf_counter() - start) / 3 * len(arrived)
        total -= masked * np.uint64(3)
        stages.rows.append({**stages.case, "stage": "sum", "seconds": adding, "down": 0, "up": 0})
        message = {**common, "clients": arrived}
        tags = stages.time(
            "confirm", [lambda k=k: own[k].confirm(message) for k in arrived], size(message)
        )
        sent = [{**message, "tags": np.stack([t["tags"][k] for t in tags])} for k in arrived]
        given = stages.time(
            "reveal", [lambda k=k: own[k].reveal(sent[k]) for k in arrived], size(sent[0])
        )
        roster = Roster(
            name, tuple(ids.tolist()), tuple(k.tobytes() for k in told["keys"]), threshold
        )
        promises = {
            int(k): Promise(*(part.tobytes() for part in s["promise"]))
            for k, s in zip(ids, shared, strict=True)
        }
        revealed = {
            int(k): dict(zip(g["clients"].tolist(), map(bytes, g["shares"]), strict=True))
            for k, g in zip(arrived, given, strict=True)
        }
        server = MaskedSum(roster, promises)
        (opened,) = stages.time("open", [lambda: server.unmask(total, arrived.tolist(), revealed)])
        if all_masked and not np.array_equal(opened, plain):
            raise RuntimeError("the sum is not that of the numbers without masks")
    return [{**row, "compared": all_masked} for row in stages.rows]


def main() -> None:
    for case in parse_options(__doc__, cases=CASES).cases:
        rows = run(*map(int, case.split("x")))
        load = dict(zip(("1", "5", "15"), os.getloadavg(), strict=True))
        keep_rows("secure_sums", rows, ["clients", "numbers"], {"load-average": load})


if __name__ == "__main__":
    main()
