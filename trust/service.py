"""The key server and the shuffling server as small web applications."""

import asyncio
import json
from logging import getLogger
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from fedntk.ntk import UploadLimits

from .key_server import KeyServer, NotEnrolled
from .remote import SEALED_SEED_PATH, SHUFFLE_PATH, VOUCHER_PATH
from .sealing import KEY_BYTES, SealError, unframe
from .shuffling_server import ShufflingServer

__all__ = ["key_server_app", "read_enrolled", "shuffling_server_app"]

BODY_LIMIT = 2_000_000_000
BODY_TIMEOUT = 600.0
SMALL_BODY = 10_000
SMALL_BODY_TIMEOUT = 30.0
LONGEST_CAUSE = 300  # characters
logger = getLogger("uvicorn.error")


def key_server_app(
    server: KeyServer, enrolled: Path, *, body_timeout: float = SMALL_BODY_TIMEOUT
) -> FastAPI:
    """Serve sealed seeds and vouchers; the file of enrolled keys is read anew for each.

    Parameters
    ----------
    server : KeyServer
        Which seals.
    enrolled : Path
        See :func:`read_enrolled`. While it cannot be read, the keys read last stay enrolled.
    body_timeout : float
        Seconds for the whole body of a request, however it comes in; status 408 after that.
    """
    app = _app()

    async def parts_of(request: Request, *names: str) -> list[bytes]:
        parts = unframe(await _body(request, SMALL_BODY, body_timeout))
        if len(parts) != len(names):
            raise SealError(f"expected {', '.join(names)}, got {len(parts)} parts")
        try:
            server.enrol(read_enrolled(enrolled))
        except (SealError, OSError) as error:
            logger.warning("the keys enrolled before stay: %s", error)
        return parts

    @app.post(SEALED_SEED_PATH)
    async def sealed_seed(request: Request) -> Response:
        key, run, challenge = await parts_of(request, "public key", "run", "challenge")
        return _answer(server.sealed_seed(key, run.decode(errors="replace"), challenge))

    @app.post(VOUCHER_PATH)
    async def voucher(request: Request) -> Response:
        key, run = await parts_of(request, "public key", "run")
        return _answer(server.voucher(key, run.decode(errors="replace")))

    return app


def shuffling_server_app(
    server: ShufflingServer, *, body_limit: int = BODY_LIMIT, body_timeout: float = BODY_TIMEOUT
) -> FastAPI:
    """Serve shuffled uploads.

    Parameters
    ----------
    server : ShufflingServer
        Which shuffles.
    body_limit : int
        Bytes of a round's sealed uploads together.
    body_timeout : float
        Seconds for the whole body of a request, however it comes in; status 408 after that.
    """
    app = _app()

    @app.post(SHUFFLE_PATH)
    async def shuffle(request: Request) -> Response:
        body = await _body(request, body_limit, body_timeout)
        return _answer(await run_in_threadpool(answered, body))

    def answered(body: bytes) -> bytes:
        head, *sealed = unframe(body) or [b""]
        try:
            fields = json.loads(head)
            limits = UploadLimits.from_json(fields["limits"])
            run, server_round = str(fields["run"]), int(fields["server-round"])
            claims = fields["num-examples"]
            if claims is not None and [type(n) for n in claims] != [int] * len(sealed):
                raise ValueError(f"expected {len(sealed)} whole numbers of examples, got {claims}")
        except Exception as error:  # whatever a hostile head provokes
            raise SealError(
                f"expected limits, run and round as JSON: {error!r:.{LONGEST_CAUSE}}"
            ) from None
        shuffled = server.shuffle(
            sealed, limits=limits, run=run, server_round=server_round, num_examples=claims
        )
        return shuffled.to_bytes()

    return app


def read_enrolled(path: Path) -> list[bytes]:
    """Read public keys from a file: one a line in hexadecimal, then a name; # begins a comment.

    Raises
    ------
    OSError
        If the file cannot be read.
    SealError
        If a line does not begin with a key.
    """
    keys = []
    text = path.read_bytes().decode(errors="replace")  # names may be in any encoding
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key = bytes.fromhex(words[0])
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise SealError(
                f"{path}, line {number}: expected {2 * KEY_BYTES} hexadecimal digits, got "
                f"{words[0][:80]!r}; new-key prints a client's public key"
            )
        keys.append(key)
    return keys


def _app() -> FastAPI:
    return FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            SealError: _refused,
            TimeoutError: _too_slow,
            ClientDisconnect: _broken_off,
        },
    )


async def _refused(_: Request, error: Exception) -> Response:
    return _refusal(error, 403 if isinstance(error, NotEnrolled) else 400)


async def _too_slow(_: Request, error: Exception) -> Response:
    return _refusal(SealError(str(error)), 408)


def _refusal(error: Exception, status: int) -> Response:
    return JSONResponse({"error": type(error).__name__, "message": str(error)}, status_code=status)


async def _broken_off(request: Request, _: Exception) -> Response:
    """Answer nobody: the client has gone."""
    logger.info("a request to %s broke off", request.url.path)
    return Response(status_code=400)


async def _body(request: Request, limit: int, timeout: float) -> bytes:
    """Whole body of a request. One that is too large is read to its end, and not kept."""
    body = bytearray()
    size = 0
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
            f"expected the whole request within {timeout:g} s, got {size} bytes of it; send fewer "
            "uploads or fewer examples, or start the server with a larger --body-timeout"
        ) from None
    if size > limit:
        raise SealError(
            f"expected a request of at most {limit} bytes, got {size}; send fewer uploads or fewer "
            "examples, or start the server with a larger limit"
        )
    return bytes(body)


def _answer(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")
