"""The key server and the shuffling server in other processes, with the methods of the local ones.

A request holds the arguments of a method (see :mod:`fedntk.trust.wire`), its answer is bytes. A
refusal is the error's message as JSON; its status says which error is raised here.
"""

import ssl
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from fedntk.ntk import UploadLimits

from .key_server import NotEnrolled
from .sealing import SealError, load_token
from .shuffling_server import Shuffled
from .wire import SEALED_SEED, SHUFFLE, VOUCHER, pack

CHUNK_BYTES = 1_000_000
_ERRORS: dict[int, type[Exception]] = {401: ConnectionError, 403: NotEnrolled}  # else SealError


class _Remote:
    command: str  # starts the server
    timeout = 30.0

    def __init__(
        self,
        url: str,
        token: str | Path,
        *,
        timeout: float | None = None,
        verify: bool | str | Path = True,
    ) -> None:
        self.url = url.rstrip("/")
        context = verify if isinstance(verify, bool) else ssl.create_default_context(cafile=verify)
        self._options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {load_token(token)}"},
            "timeout": self.timeout if timeout is None else timeout,
            "verify": context,
        }

    def _ask(self, path: str, parts: Sequence[bytes], **named: Any) -> bytes:
        body = pack(named, parts)
        # in chunks: of a body in one piece, each write copies the rest
        chunks = (body[i : i + CHUNK_BYTES] for i in range(0, len(body), CHUNK_BYTES))
        try:
            response = httpx.post(self.url + path, content=chunks, **self._options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConnectionError(
                f"no {self.command} answers at {self.url} ({error or type(error).__name__}); start "
                f"it with `python -m fedntk.trust {self.command}`, or correct the address"
            ) from None
        if response.is_success:
            return response.content
        try:
            raised = _ERRORS.get(response.status_code, SealError)(response.json()["message"])
        except Exception:  # whatever answers at this address
            raised = SealError(
                f"the {self.command} at {self.url} answered with status {response.status_code}; "
                "see its log, and check the address"
            )
        raise raised


class RemoteKeyServer(_Remote):
    """A :class:`KeyServer` in another process; ConnectionError if it does not answer this caller.

    Parameters
    ----------
    url : str
        Address, such as ``"https://keys.example.org:9191"``.
    token : str or Path
        File that ``python -m fedntk.trust new-token`` made; the server has the same.
    timeout : float
        Seconds to wait without progress, 30 by default.
    verify : bool, str or Path
        Whether its TLS certificate is checked; or a file with the certificate of the authority
        that signed it.
    """

    command = "key-server"

    def sealed_seed(self, public_key: bytes, challenge: bytes, run: str) -> bytes:
        """See :meth:`KeyServer.sealed_seed`."""
        return self._ask(SEALED_SEED, [public_key, challenge], run=run)

    def voucher(self, public_key: bytes, run: str) -> bytes:
        """See :meth:`KeyServer.voucher`."""
        return self._ask(VOUCHER, [public_key], run=run)


class RemoteShufflingServer(_Remote):
    """A :class:`ShufflingServer` in another process; parameters as of :class:`RemoteKeyServer`.

    `timeout` is 600 by default. A round on which the caller gives up is lost: its rows are not
    given out again.
    """

    command = "shuffling-server"
    timeout = 600.0

    def shuffle(self, sealed: Sequence[bytes], *, limits: UploadLimits, **options: Any) -> Shuffled:
        """See :meth:`ShufflingServer.shuffle`, which has the `options`."""
        answer = self._ask(SHUFFLE, sealed, limits=asdict(limits), **options)
        try:
            return Shuffled.from_bytes(answer, parameters=limits.parameters)
        except Exception as error:  # whatever answers at this address
            raise SealError(
                f"the answer from {self.url} is no shuffling server's ({error}); check the address"
            ) from None
