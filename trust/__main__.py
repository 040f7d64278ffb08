"""The command ``python -m fedntk.trust``: keys, and the two servers as processes."""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from .key_server import KeyServer, load_secret, new_secret
from .sealing import SealError, load_key, load_token, new_key, public_bytes, save_key, write_secret
from .service import (
    BODY_LIMIT,
    BODY_TIMEOUT,
    SMALL_BODY_TIMEOUT,
    key_server_app,
    read_enrolled,
    shuffling_server_app,
)
from .shuffling_server import ShufflingServer

HEAD_TIMEOUT = 20.0  # seconds


class _ErrorsInOneLine(typer.core.TyperGroup):
    def invoke(self, ctx: click.Context) -> Any:
        """Say what is wrong without a traceback, and exit with 2."""
        try:
            return super().invoke(ctx)
        except (SealError, OSError) as error:
            typer.echo(f"fedntk.trust: {error}", err=True)
            sys.exit(2)


app = typer.Typer(
    cls=_ErrorsInOneLine,
    help="The trusted third parties of CP-NTK-FL: keys, a key server, a shuffling server.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

NewFile = Annotated[
    Path, typer.Argument(help="Only its owner can read it; an existing file is not replaced.")
]
Token = Annotated[Path, typer.Option(help="Made by new-token; the ServerApp has the same.")]
Enrolled = Annotated[
    Path, typer.Option(help="Public keys of the clients, one a line; may change at any time.")
]
BodyTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds for a request's body; then it is refused.")
]
Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(help="Port to listen at.")]
Certificate = Annotated[Path | None, typer.Option(help="TLS certificate, PEM.")]
CertificateKey = Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")]


@app.command("new-key")
def new_key_command(file: NewFile) -> None:
    """Make a private key, for a client or a shuffling server, and print its public key."""
    key = new_key()
    save_key(key, file)
    typer.echo(public_bytes(key).hex())


@app.command("new-key-server")
def new_key_server_command(file: NewFile) -> None:
    """Make a key server's secret, and print its verification key, for the clients.

    If the file is lost, the seeds of past runs are lost.
    """
    typer.echo(new_secret(file).hex())


@app.command("new-token")
def new_token_command(file: NewFile) -> None:
    """Make a token, by which the two servers know the ServerApp."""
    write_secret(file, secrets.token_hex().encode())


@app.command("key-server")
def key_server_command(
    *,
    secret: Annotated[Path, typer.Option(help="Made by new-key-server.")],
    enrolled: Enrolled,
    token: Token,
    body_timeout: BodyTimeout = SMALL_BODY_TIMEOUT,
    host: Host = "127.0.0.1",
    port: Port = 9191,
    ssl_certfile: Certificate = None,
    ssl_keyfile: CertificateKey = None,
) -> None:
    """Print the verification key, and give enrolled clients the projection's seed, sealed."""
    master, signing_key = load_secret(secret)
    server = KeyServer(master, read_enrolled(enrolled), signing_key)
    service = key_server_app(server, enrolled, load_token(token), body_timeout)
    typer.echo(server.verify_key.hex())
    _serve(service, host, port, ssl_certfile, ssl_keyfile)


@app.command("shuffling-server")
def shuffling_server_command(
    *,
    secret: Annotated[Path, typer.Option(help="Private key, made by new-key.")],
    enrolled: Enrolled,
    token: Token,
    min_clients: Annotated[
        int, typer.Option(min=2, help="With fewer good uploads nothing is given out.")
    ] = 2,
    body_limit: Annotated[
        int, typer.Option(min=1, help="Bytes of all requests together at a time.")
    ] = BODY_LIMIT,
    body_timeout: BodyTimeout = BODY_TIMEOUT,
    host: Host = "127.0.0.1",
    port: Port = 9192,
    ssl_certfile: Certificate = None,
    ssl_keyfile: CertificateKey = None,
) -> None:
    """Print the public key, and permute the rows of uploads that clients sealed with it."""
    server = ShufflingServer(read_enrolled(enrolled), load_key(secret), min_clients=min_clients)
    service = shuffling_server_app(server, enrolled, load_token(token), body_limit, body_timeout)
    typer.echo(server.public_key.hex())
    _serve(service, host, port, ssl_certfile, ssl_keyfile)


class _OneRequest(H11Protocol):
    """A connection that is closed if a head takes longer, for which uvicorn has no limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_TIMEOUT, self._close_without_a_head)

    def _close_without_a_head(self) -> None:
        if self.cycle is None:  # uvicorn sets it when a head is whole
            self.transport.close()


def _serve(
    service: FastAPI, host: str, port: int, certificate: Path | None, key: Path | None
) -> None:
    """Serve one request a connection: a second would have no limit for its head.

    A proxy in front has to limit how long the caller reads its answer, and how many strangers
    connect at once, each with a head in memory.
    """
    uvicorn.run(
        service,
        host=host,
        port=port,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        server_header=False,
        headers=[("connection", "close")],
        http=_OneRequest,
        ws="none",
    )


if __name__ == "__main__":
    app(prog_name="python -m fedntk.trust")
