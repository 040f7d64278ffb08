"""The key server and the shuffling server as small web applications."""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Callable
from logging import getLogger
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError, validate_call
from starlette.authentication import AuthenticationError
from starlette.requests import ClientDisconnect

from .key_server import Enrolment, KeyServer, NotEnrolled
from .sealing import KEY_BYTES, SealError
from .shuffling_server import ShufflingServer
from .wire import SEALED_SEED, SHUFFLE, VOUCHER, unpack

Answers = dict[str, Callable[..., bytes]]  # by address
BODY_LIMIT, BODY_TIMEOUT = 2_000_000_000, 600.0
SMALL_BODY, SMALL_BODY_TIMEOUT = 10_000, 30.0
SHORTER = "send fewer uploads or fewer examples, or start the server with a larger"
STATUS: dict[type[Exception], int] = {AuthenticationError: 401, NotEnrolled: 403, TimeoutError: 408}
logger = getLogger("uvicorn.error")


def key_server_app(server: KeyServer, enrolled: Path, token: str, body_timeout: float) -> FastAPI:
    """Serve sealed seeds and vouchers to who has the `token`.

    The file of `enrolled` keys is read anew for each; while that fails, the keys read last stay.
    `body_timeout` is in seconds, for the whole body of a request.
    """
    seed, voucher = validate_call(server.sealed_seed), validate_call(server.voucher)
    answers: Answers = {SEALED_SEED: seed, VOUCHER: voucher}
    return _app(server, enrolled, token, answers, SMALL_BODY, body_timeout)


def shuffling_server_app(
    server: ShufflingServer, enrolled: Path, token: str, body_limit: int, body_timeout: float
) -> FastAPI:
    """Serve shuffled uploads; as a key server's, with `body_limit` bytes in all at a time."""
    checked = validate_call(server.shuffle)

    def shuffle(*sealed: bytes, **named: Any) -> bytes:
        return checked(sealed, **named).to_bytes()

    return _app(server, enrolled, token, {SHUFFLE: shuffle}, body_limit, body_timeout)


def read_enrolled(path: Path) -> list[bytes]:
    """Read public keys from a file: one a line in hexadecimal, then a name; # begins a comment."""
    keys = []
    text = path.read_bytes().decode(errors="replace")  # names may be in any encoding
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", words[0]):
            raise SealError(
                f"{path}, line {number}: expected {2 * KEY_BYTES} hexadecimal digits, got "
                f"{words[0][:80]!r}; new-key prints a client's public key"
            )
        keys.append(bytes.fromhex(words[0]))
    return keys


def _app(
    server: Enrolment, enrolled: Path, token: str, answers: Answers, limit: int, timeout: float
) -> FastAPI:
    held = 0  # bytes of all requests

    async def require_token(request: Request) -> None:
        """Refuse a request by its head: no byte of its body is read."""
        sent = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(sent, f"Bearer {token}".encode()):
            raise AuthenticationError("expected the token with which this server was started")

    async def read_body(request: Request) -> AsyncIterator[bytes]:
        """Yield the body. One that is too large is read to its end, and not kept."""
        nonlocal held
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(timeout):
                async for chunk in request.stream():
                    if len(body) == size and held + len(chunk) <= limit:
                        body += chunk
                        held += len(chunk)
                    else:
                        held -= len(body)
                        body.clear()
                    size += len(chunk)
            if size > len(body):
                raise SealError(
                    f"expected requests of at most {limit} bytes in all at a time, got {size} and "
                    f"{held} of others; {SHORTER} --body-limit"
                )
            yield bytes(body)
        except TimeoutError:
            raise TimeoutError(
                f"expected the whole request within {timeout:g} s, got {size} bytes of it; "
                f"{SHORTER} --body-timeout"
            ) from None
        finally:
            held -= len(body)

    def serve(path: str, answer: Callable[..., bytes]) -> None:
        @app.post(path)  # not async: FastAPI runs it in a thread
        def respond(body: Annotated[bytes, Depends(read_body)]) -> Response:
            named, parts = unpack(body)
            try:
                server.enrol(read_enrolled(enrolled))
            except (SealError, OSError) as error:
                logger.warning("the keys enrolled before stay: %s", error)
            try:
                content = answer(*parts, **named)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, first["loc"]))
                raise SealError(f"malformed request: {where!r:.100}: {first['msg']:.200}") from None
            return Response(content, media_type="application/octet-stream")

    app = FastAPI(openapi_url=None, dependencies=[Depends(require_token)])
    for refused in [*STATUS, SealError, ClientDisconnect]:  # who has gone hears nothing
        app.add_exception_handler(refused, _refuse)
    for path, answer in answers.items():
        serve(path, answer)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    return JSONResponse({"message": str(error)}, STATUS.get(type(error), 400))
