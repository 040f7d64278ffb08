"""The key server and the shuffling server in other processes, with the methods of the local ones.

They answer at the addresses of :mod:`fedntk.trust.service`. Requests and answers are framed bytes;
a refusal is JSON of the error's name and message, and comes back as the same error.
"""

import json
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from fedntk.ntk import UploadLimits

from .key_server import NotEnrolled
from .sealing import SealError, check_run, frame
from .shuffling_server import Shuffled

__all__ = [
    "SEALED_SEED_PATH",
    "SHUFFLE_PATH",
    "VOUCHER_PATH",
    "RemoteKeyServer",
    "RemoteShufflingServer",
]

SEALED_SEED_PATH = "/sealed-seed"
VOUCHER_PATH = "/voucher"
SHUFFLE_PATH = "/shuffle"
CHUNK_BYTES = 1_000_000
_ERRORS = {error.__name__: error for error in (SealError, NotEnrolled)}


class _Remote:
    """A server that is asked over HTTP; `command` is what starts it."""

    command: str

    def __init__(self, url: str, timeout: float, verify: bool | str | Path) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._verify = (
            verify if isinstance(verify, bool) else ssl.create_default_context(cafile=verify)
        )

    def _post(self, path: str, body: bytes) -> bytes:
        try:
            response = httpx.post(
                self.url + path, content=_chunks(body), timeout=self._timeout, verify=self._verify
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConnectionError(
                f"no {self.command} answers at {self.url} ({error or type(error).__name__}); start "
                f"it with `python -m fedntk.trust {self.command}`, or correct the address"
            ) from None
        if response.is_success:
            return response.content
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> SealError:
        try:
            refusal = response.json()
            return _ERRORS[refusal["error"]](refusal["message"])
        except Exception:  # whatever answers at this address
            return SealError(
                f"the {self.command} at {self.url} answered with status {response.status_code}; "
                "see its log, and check the address"
            )


class RemoteKeyServer(_Remote):
    """A :class:`KeyServer` in another process.

    Parameters
    ----------
    url : str
        Such as ``"https://keys.example.org:9191"``.
    timeout : float
        Seconds without progress until it is given up.
    verify : bool, str or Path
        Whether its TLS certificate is checked; or a file with the certificate authority's, for
        certificates of one's own.
    """

    command = "key-server"

    def __init__(self, url: str, *, timeout: float = 30, verify: bool | str | Path = True) -> None:
        super().__init__(url, timeout, verify)

    def sealed_seed(self, public_key: bytes, run: str, challenge: bytes) -> bytes:
        """Return the run's seed sealed for one client, as :meth:`KeyServer.sealed_seed`.

        Raises
        ------
        NotEnrolled, SealError
            As the key server itself.
        ConnectionError
            If it does not answer.
        """
        return self._post(SEALED_SEED_PATH, frame([public_key, check_run(run), challenge]))

    def voucher(self, public_key: bytes, run: str) -> bytes:
        """Return a signature that vouches for a key, as :meth:`KeyServer.voucher`.

        Raises
        ------
        NotEnrolled, SealError
            As the key server itself.
        ConnectionError
            If it does not answer.
        """
        return self._post(VOUCHER_PATH, frame([public_key, check_run(run)]))


class RemoteShufflingServer(_Remote):
    """A :class:`ShufflingServer` in another process.

    Parameters
    ----------
    url : str
        Such as ``"https://shuffle.example.org:9192"``.
    timeout : float
        Seconds without progress until it is given up; the shuffling itself is such a time. What
        was given out to a caller that had given up is not given out again.
    verify : bool, str or Path
        Whether its TLS certificate is checked; or a file with the certificate authority's, for
        certificates of one's own.
    """

    command = "shuffling-server"

    def __init__(self, url: str, *, timeout: float = 600, verify: bool | str | Path = True) -> None:
        super().__init__(url, timeout, verify)

    def shuffle(
        self,
        sealed: Sequence[bytes],
        *,
        limits: UploadLimits,
        run: str,
        server_round: int,
        num_examples: Sequence[int] | None = None,
    ) -> Shuffled:
        """Have the uploads of a round opened and permuted, as :meth:`ShufflingServer.shuffle`.

        Raises
        ------
        SealError
            As the shuffling server itself, or if these are too many bytes for it, or the answer
            cannot be read.
        ConnectionError
            If it does not answer.
        """
        head = {
            "limits": limits.to_json(),
            "run": run,
            "server-round": server_round,
            "num-examples": None if num_examples is None else list(num_examples),
        }
        answer = self._post(SHUFFLE_PATH, frame([json.dumps(head).encode(), *sealed]))
        try:
            return Shuffled.from_bytes(answer, parameters=limits.parameters)
        except Exception as error:  # whatever answers at this address
            raise SealError(
                f"the answer from {self.url} is no shuffling server's ({error}); check the address"
            ) from None


def _chunks(body: bytes) -> Iterator[bytes]:
    """Pieces of the body: sent as one, each part of it that is written copies the rest."""
    for start in range(0, len(body), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]
