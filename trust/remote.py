"""The key server and the shuffling server in other processes, with the methods of the local ones.

A request holds the arguments of a method (see :mod:`fedntk.trust.wire`), its answer is bytes. A
refusal is JSON, the error's name and message, and is raised here as the same error.
"""

import ssl
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from fedntk.ntk import UploadLimits

from .key_server import NotEnrolled
from .sealing import SealError
from .shuffling_server import Shuffled
from .wire import SEALED_SEED, SHUFFLE, VOUCHER, pack

__all__ = ["RemoteKeyServer", "RemoteShufflingServer"]

CHUNK_BYTES = 1_000_000
_ERRORS = {error.__name__: error for error in (SealError, NotEnrolled)}


class _Remote:
    command: str  # starts the server

    def __init__(self, url: str, timeout: float, verify: bool | str | Path) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._verify = (
            verify if isinstance(verify, bool) else ssl.create_default_context(cafile=verify)
        )

    def _ask(self, path: str, parts: Sequence[bytes], **named: Any) -> bytes:
        body = pack(named, parts)
        # in chunks: of a body in one piece, each write copies the rest
        chunks = (body[i : i + CHUNK_BYTES] for i in range(0, len(body), CHUNK_BYTES))
        try:
            response = httpx.post(
                self.url + path, content=chunks, timeout=self._timeout, verify=self._verify
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConnectionError(
                f"no {self.command} answers at {self.url} ({error or type(error).__name__}); start "
                f"it with `python -m fedntk.trust {self.command}`, or correct the address"
            ) from None
        if response.is_success:
            return response.content
        try:
            refusal = response.json()
            raised = _ERRORS[refusal["error"]](refusal["message"])
        except Exception:  # whatever answers at this address
            raised = SealError(
                f"the {self.command} at {self.url} answered with status {response.status_code}; "
                "see its log, and check the address"
            )
        raise raised


class RemoteKeyServer(_Remote):
    """A :class:`KeyServer` in another process; ConnectionError if it does not answer.

    Parameters
    ----------
    url : str
        Address, such as ``"https://keys.example.org:9191"``.
    timeout : float
        Seconds to wait without progress.
    verify : bool, str or Path
        Whether its TLS certificate is checked; or a file with the certificate of the authority
        that signed it.
    """

    command = "key-server"

    def __init__(self, url: str, *, timeout: float = 30, verify: bool | str | Path = True) -> None:
        super().__init__(url, timeout, verify)

    def sealed_seed(self, public_key: bytes, run: str, challenge: bytes) -> bytes:
        """Return the run's seed sealed for one client, as :meth:`KeyServer.sealed_seed`."""
        return self._ask(SEALED_SEED, [public_key, challenge], run=run)

    def voucher(self, public_key: bytes, run: str) -> bytes:
        """Return a signature that vouches for a key, as :meth:`KeyServer.voucher`."""
        return self._ask(VOUCHER, [public_key], run=run)


class RemoteShufflingServer(_Remote):
    """A :class:`ShufflingServer` in another process; parameters as of :class:`RemoteKeyServer`.

    It may take a while to shuffle. If the caller gives up after `timeout` seconds, the round is
    lost: its rows are not given out again.
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
        """Have the uploads of a round opened and permuted, as :meth:`ShufflingServer.shuffle`."""
        answer = self._ask(
            SHUFFLE,
            sealed,
            limits=asdict(limits),
            run=run,
            server_round=server_round,
            num_examples=num_examples,
        )
        try:
            return Shuffled.from_bytes(answer, parameters=limits.parameters)
        except Exception as error:  # whatever answers at this address
            raise SealError(
                f"the answer from {self.url} is no shuffling server's ({error}); check the address"
            ) from None
