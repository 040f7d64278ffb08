"""The key server and the shuffling server as small web applications."""

import asyncio
import re
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError, validate_call
from starlette.requests import ClientDisconnect

from .key_server import KeyServer, NotEnrolled
from .sealing import KEY_BYTES, SealError
from .shuffling_server import ShufflingServer
from .wire import SEALED_SEED, SHUFFLE, VOUCHER, unpack

BODY_LIMIT = 2_000_000_000
BODY_TIMEOUT = 600.0
SMALL_BODY = 10_000
SMALL_BODY_TIMEOUT = 30.0
SHORTER = "send fewer uploads or fewer examples, or start the server with a larger"
STATUS: dict[type[Exception], int] = {NotEnrolled: 403, TimeoutError: 408}  # others are 400
logger = getLogger("uvicorn.error")


def key_server_app(
    server: KeyServer, enrolled: Path, *, body_timeout: float = SMALL_BODY_TIMEOUT
) -> FastAPI:
    """Serve sealed seeds and vouchers.

    The file of `enrolled` keys is read anew for each. While it cannot be read, the keys read last
    stay enrolled. `body_timeout` is in seconds, for the whole body of a request.
    """

    def enrol() -> None:
        try:
            server.enrol(read_enrolled(enrolled))
        except (SealError, OSError) as error:
            logger.warning("the keys enrolled before stay: %s", error)

    @validate_call
    def sealed_seed(public_key: bytes, challenge: bytes, *, run: str) -> bytes:
        enrol()
        return server.sealed_seed(public_key, run, challenge)

    @validate_call
    def voucher(public_key: bytes, *, run: str) -> bytes:
        enrol()
        return server.voucher(public_key, run)

    return _app({SEALED_SEED: sealed_seed, VOUCHER: voucher}, SMALL_BODY, body_timeout)


def shuffling_server_app(
    server: ShufflingServer, *, body_limit: int = BODY_LIMIT, body_timeout: float = BODY_TIMEOUT
) -> FastAPI:
    """Serve shuffled uploads: `body_limit` bytes at most, within `body_timeout` seconds."""
    checked = validate_call(server.shuffle)

    def shuffle(*sealed: bytes, **named: Any) -> bytes:
        return checked(sealed, **named).to_bytes()

    return _app({SHUFFLE: shuffle}, body_limit, body_timeout)


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


def _app(answers: dict[str, Callable[..., bytes]], limit: int, timeout: float) -> FastAPI:
    """Serve functions at addresses; they have pydantic check the arguments of requests."""

    async def read_body(request: Request) -> bytes:
        """Return the body. One that is too large is read to its end, and not kept."""
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(timeout):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limit:
                        body += chunk
                    else:
                        body.clear()
        except TimeoutError:
            raise TimeoutError(
                f"expected the whole request within {timeout:g} s, got {size} bytes of it; "
                f"{SHORTER} --body-timeout"
            ) from None
        if size > limit:
            raise SealError(
                f"expected a request of at most {limit} bytes, got {size}; {SHORTER} limit"
            )
        return bytes(body)

    def serve(path: str, answer: Callable[..., bytes]) -> None:
        @app.post(path)  # not async: FastAPI runs it in a thread
        def respond(body: Annotated[bytes, Depends(read_body)]) -> Response:
            named, parts = unpack(body)
            try:
                content = answer(*parts, **named)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, first["loc"]))
                raise SealError(f"malformed request: {where!r:.100}: {first['msg']:.200}") from None
            return Response(content, media_type="application/octet-stream")

    app = FastAPI(openapi_url=None)
    for refused in (SealError, TimeoutError, ClientDisconnect):  # who has gone hears nothing
        app.add_exception_handler(refused, _refuse)
    for path, answer in answers.items():
        serve(path, answer)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    name = "NotEnrolled" if isinstance(error, NotEnrolled) else "SealError"
    return JSONResponse({"error": name, "message": str(error)}, STATUS.get(type(error), 400))
