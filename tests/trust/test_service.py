"""Both servers behind HTTP: the same answers and refusals, and no secrets told."""

import functools
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from select import select
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from typer.testing import CliRunner

from fedntk import trust
from fedntk.ntk import JacobianUpload, UploadLimits
from fedntk.simulations.deploy.certificates import make_certificates
from fedntk.trust.__main__ import app
from fedntk.trust.key_server import load_secret
from fedntk.trust.service import read_enrolled
from fedntk.trust.wire import frame, pack

from .uploads import CLIENTS, ENROLLED, LIMITS, ROUND, RUN, refused, rows, sealed, shuffle, upload

BODY_LIMIT = 100_000


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output.strip()


@contextmanager
def thread(*arguments: object) -> Iterator[int]:
    """Start a server in a thread and give its port; at the end its log is whole."""
    made: list[uvicorn.Server] = []

    def run(service: FastAPI, **settings: Any) -> None:
        made.append(uvicorn.Server(uvicorn.Config(service, **settings | {"log_config": None})))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "run", run)
        code, printed = command(*arguments)
    assert code == 0
    assert re.fullmatch("[0-9a-f]{64}", printed)  # its public or verification key
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = Thread(target=made[0].run, args=([listener],))
        running.start()
        try:
            yield listener.getsockname()[1]
        finally:
            made[0].should_exit = True
            running.join(20)
            assert not running.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def received(client: socket.socket, size: int = 1_000_000) -> bytes:
    """Return the next bytes: fewer than `size` if the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while len(data) < size and (more := client.recv(size - len(data))):
            data += more
    return data


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def send_head(client: socket.socket, path: str, *lines: str, size: int = 1000) -> bytes:
    """Send the head of a request; the answer is CONTINUE if the server waits for the body."""
    first = (f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {size}")
    client.sendall("\r\n".join([*first, "Expect: 100-continue", *lines, "", ""]).encode())
    return received(client, len(CONTINUE))


def trickle(client: socket.socket) -> bytes:
    """Send a byte now and then until the server answers, or closes the connection."""
    for _ in range(500):
        if select([client], [], [], 0.02)[0]:
            return received(client)
        client.sendall(b"x")
    raise TimeoutError("the server goes on reading")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The key server behind TLS, and the shuffling server with a small limit."""
    folder = tmp_path_factory.mktemp("trust")
    names = ("secret", "enrolled", "key.pem", "token")
    secret, enrolled, key, token = (folder / name for name in names)
    assert command("new-key-server", secret)[0] == command("new-key", key)[0] == 0
    assert command("new-token", token) == (0, "")
    enrolled.write_text("# nobody yet\n")
    (folder / "clients").write_text("\n".join(key.hex() for key in ENROLLED))
    tls = make_certificates(folder)
    for_keys = ("key-server", "--secret", secret, "--enrolled", enrolled, "--token", token)
    for_uploads = ("shuffling-server", "--secret", key, "--enrolled", folder / "clients")
    for_uploads = (*for_uploads, "--token", token)
    with (
        pytest.MonkeyPatch.context() as patch,
        thread(*for_keys, "--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key) as key_port,
        thread(*for_uploads, "--body-limit", BODY_LIMIT) as shuffling_port,
    ):
        patch.setenv("NO_PROXY", "127.0.0.1")
        key_url, url = f"https://127.0.0.1:{key_port}", f"http://127.0.0.1:{shuffling_port}"
        yield SimpleNamespace(
            **{"secret": secret, "enrolled": enrolled, "key": key, "key_url": key_url, "url": url},
            **{"token": token, "authorised": f"Authorization: Bearer {token.read_text()}"},
            commands={"/sealed-seed": for_keys, "/shuffle": for_uploads},
            keys=trust.RemoteKeyServer(key_url, token, verify=tls.authority),
            shuffling=trust.RemoteShufflingServer(url + "/", token),
            port=shuffling_port,
        )


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level("INFO")
    return caplog


def enrol(servers, key) -> bytes:
    with servers.enrolled.open("a") as file:
        file.write(f"{trust.public_bytes(key).hex()}  hospital of {RUN} # by phone\n")
    return trust.public_bytes(key)


def test_seeds_and_vouchers_come_from_elsewhere_and_secrets_stay_there(servers, log):
    master, signing_key = load_secret(servers.secret)
    here, key = trust.KeyServer(master, [], signing_key), trust.new_key()
    client = trust.ClientKeys(key, run=RUN, verify_key=here.verify_key, state={})
    request = client.request()
    public_key = enrol(servers, key)
    data = servers.keys.sealed_seed(public_key, request["challenge"], RUN)
    seed = client.open(data)
    assert seed == here.projection_seed(RUN)
    assert seed not in data
    trust.check_voucher(servers.keys.voucher(public_key, RUN), public_key, RUN, here.verify_key)
    assert '"POST /sealed-seed HTTP/1.1" 200' in log.text
    for secret in (seed, master):
        assert secret.hex() not in log.text
        assert repr(secret) not in log.text


def test_enrolled_keys_may_change_while_it_runs(servers, log):
    key = trust.new_key()
    public_key = trust.public_bytes(key)
    asked = public_key, bytes(16), RUN
    refused("is not enrolled", servers.keys.sealed_seed, *asked, error=trust.NotEnrolled)
    refused("is not enrolled", servers.keys.voucher, public_key, RUN, error=trust.NotEnrolled)
    enrol(servers, key)
    servers.keys.sealed_seed(*asked)
    before = servers.enrolled.read_text()
    servers.enrolled.write_text(before + "half a li")
    servers.keys.sealed_seed(*asked)
    line = len(before.splitlines()) + 1
    assert f"line {line}: expected 64 hexadecimal digits" in log.text
    servers.enrolled.write_text("")
    refused("is not enrolled", servers.keys.sealed_seed, *asked, error=trust.NotEnrolled)


def test_refusals_are_the_servers_own(servers):
    public_key = enrol(servers, trust.new_key())
    with pytest.raises(trust.SealError, match="challenge: expected 16 bytes, got 3") as error:
        servers.keys.sealed_seed(public_key, b"abc", RUN)
    assert type(error.value) is trust.SealError
    refused("at most 10000 .* got 20", servers.keys.sealed_seed, public_key, bytes(20_000), RUN)
    limits = UploadLimits(LIMITS.parameters, max_examples="many")
    refused(r"malformed request: 'limits\.max_examples'", shuffle, servers.shuffling, [], limits)
    message = f"expected requests of at most {BODY_LIMIT} bytes in all at a time, got 10"
    refused(message, shuffle, servers.shuffling, [bytes(BODY_LIMIT)])


def test_wrong_address_is_named(servers, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for url, error, message in (
        (servers.url, trust.SealError, r"answered with status 404.*check the address"),
        (servers.key_url, ConnectionError, re.escape(servers.key_url) + ".*CERTIFICATE"),
        (nobody, ConnectionError, f"{nobody}.*python -m fedntk.trust key-server"),
        ("localhost:9", ConnectionError, "no key-server answers at localhost:9"),
    ):
        remote = trust.RemoteKeyServer(url, servers.token)
        refused(message, remote.sealed_seed, b"", b"", RUN, error=error)
    answers = [httpx.Response(200, content=b"<html>"), httpx.Response(400, content=DEEP)]
    monkeypatch.setattr(httpx, "post", lambda *_, **__: answers.pop(0))
    for message in ("no shuffling server's", "answered with status 400"):
        refused(message, shuffle, trust.RemoteShufflingServer(nobody, servers.token), [])


@pytest.fixture
def stranger(tmp_path):
    """A token that the servers do not know."""
    assert command("new-token", tmp_path / "stranger") == (0, "")
    return tmp_path / "stranger"


def test_an_outsider_spends_no_round_and_learns_of_no_client(servers, stranger):
    """It knows everything that is public, and even has a round's uploads."""
    public_key, keys = enrol(servers, trust.new_key()), [servers.keys, servers.shuffling]
    outsiders = [type(remote)(remote.url, stranger, verify=False) for remote in keys]
    owner = trust.ShufflingServer([], trust.load_key(servers.key))
    data = [sealed(upload(k, 10), owner, key=CLIENTS[k], run="run-9") for k in range(2)]
    ask = {"limits": LIMITS, "run": "run-9", "server_round": ROUND}
    refuses = functools.partial(refused, "expected the token with which", error=ConnectionError)
    refuses(outsiders[0].voucher, public_key, RUN)
    refuses(outsiders[0].voucher, bytes(32), RUN)
    refuses(outsiders[0].sealed_seed, public_key, bytes(16), RUN)
    refuses(outsiders[1].shuffle, data, **ask)
    assert servers.shuffling.shuffle(data, **ask).accepted == 2


def test_an_outsider_is_refused_before_its_body_is_read(servers, stranger):
    wrong = ["", "Bearer", f"Bearer {stranger.read_text()}", servers.authorised[:-1],
             servers.authorised.replace("Bearer", "Basic"), "Bearer \xe9"]  # fmt: skip
    with thread(*servers.commands["/sealed-seed"]) as port:
        for path, number in (
            ("/sealed-seed", port),
            ("/voucher", port),
            ("/shuffle", servers.port),
        ):
            for line in wrong:
                header = line if line.startswith("Auth") else f"Authorization: {line}"
                with connect(number) as client:
                    start = send_head(client, path, *[header] * bool(line), size=10**9)
                    assert start.startswith(b"HTTP/1.1 401 ")
                    assert b"connection: close" in start + received(client)


def test_all_requests_together_have_a_limit(servers):
    """One that is being sent takes room from others, until it ends."""
    size, limits = BODY_LIMIT - 1000, UploadLimits(LIMITS.parameters, max_examples="many")

    def refusal() -> str:
        with pytest.raises(trust.SealError) as error:
            shuffle(servers.shuffling, [bytes(2000)], limits)
        return str(error.value)

    def until(words: str) -> str:
        return next(said for said in (refusal() for _ in range(1000)) if words in said)

    assert "malformed" in refusal()
    with connect(servers.port) as client:
        assert send_head(client, "/shuffle", servers.authorised, size=size) == CONTINUE
        client.sendall(bytes(size - 1))
        said = until("in all at a time")
        assert f"at most {BODY_LIMIT} bytes in all at a time, got 2" in said
        assert f" and {size - 1} of others" in said
    until("malformed")


def test_a_file_without_a_token_is_refused(servers, tmp_path):
    for text in ("", "secret", "0" * 63, servers.token.read_text().upper()):
        (tmp_path / "token").write_text(text)
        refused("holds no token", trust.RemoteKeyServer, servers.key_url, tmp_path / "token")
        code, output = command(*servers.commands["/shuffle"][:-1], tmp_path / "token")
        assert (code, "holds no token for requests; new-token makes one" in output) == (2, True)


def test_uploads_are_shuffled_elsewhere(servers):
    owner = trust.ShufflingServer([], trust.load_key(servers.key))
    parts = [upload(seed, 10) for seed in range(2)]
    data = [b"rubbish", *(sealed(part, owner) for part in parts)]
    shuffled = shuffle(servers.shuffling, data)
    assert shuffled.accepted == 2
    assert {i: error.reason for i, error in shuffled.rejected.items()} == {0: "not-enrolled"}
    assert rows(shuffled.upload) == rows(JacobianUpload.concatenate(parts))
    again = shuffle(servers.shuffling, data)
    assert again.upload is None
    assert "was given out before" in again.message


def head(**changes: Any) -> bytes:
    """Return a framed head with other limits, or other values."""
    limits = {name: changes.pop(name, value) for name, value in asdict(LIMITS).items()}
    fields = {"limits": limits, "run": RUN, "server_round": ROUND}
    return frame([json.dumps(fields | changes).encode()])


DEEP = b"[" * 40_000
INFINITY = float("inf")
HOSTILE = {
    "cut off and deep": frame([DEEP]),
    "max_examples": head(max_examples=INFINITY),
    "shape": head(parameters={"weight": [INFINITY]}),
    "run in half a character": head(run="\ud800"),
    "another name in many lines": head(**{"\n" * 30_000: 1}),
    "uploads, named": head(sealed=[""]),
    "many digits": frame([b"9" * 50_000]),
    "no bytes": b"",
    "cut off": b"\xff" * 8,
    "many parts": pack({"run": RUN}, [b""] * 9),
}
REFUSALS = "malformed|expected named values|run: expe|num_examples: exp|expected requests|cut off"


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_is_refused_in_one_line_without_a_traceback(servers, log, body):
    context = httpx.create_ssl_context(verify=False)
    name, _, value = servers.authorised.partition(": ")
    for url in (servers.key_url + "/sealed-seed", servers.url + "/shuffle"):
        answer = httpx.post(url, content=body, verify=context, headers={name: value})
        assert answer.status_code == 400
        assert re.fullmatch(f"({REFUSALS}).{{,380}}", answer.json()["message"])
    assert "Traceback" not in log.text


@pytest.mark.parametrize("path", ["/sealed-seed", "/shuffle"])
def test_request_without_an_end_is_ended(servers, path):
    with thread(*servers.commands[path], "--body-timeout", 0.2) as port, connect(port) as client:
        assert send_head(client, path, servers.authorised) == CONTINUE
        head, _, body = trickle(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["message"].startswith("expected the whole request within 0.2 s, got ")


def test_connection_with_an_endless_or_a_long_head_is_closed(servers, monkeypatch):
    monkeypatch.setattr("fedntk.trust.__main__.HEAD_TIMEOUT", 0.1)
    with (
        thread(*servers.commands["/shuffle"]) as port,
        connect(port) as endless,
        connect(port) as long,
    ):
        long.sendall(b"POST /shuffle HTTP/1.1\r\nName: " + b"x" * 100_000)
        assert received(long).startswith(b"HTTP/1.1 400 ")
        endless.sendall(b"POST /shuffle HTTP/1.1\r\nName: ")
        assert trickle(endless) == b""


def test_head_in_time_may_have_a_body_that_takes_longer(servers, monkeypatch):
    """The connection made last is closed last: then the time of the one before is over."""
    monkeypatch.setattr("fedntk.trust.__main__.HEAD_TIMEOUT", 0.1)
    answer = b""
    with thread(*servers.commands["/shuffle"]) as port:
        for _ in range(100):  # on a slow machine the head itself may come too late
            with connect(port) as client, connect(port) as last:
                if send_head(client, "/shuffle", servers.authorised) == CONTINUE:
                    assert received(last) == b""
                    client.sendall(bytes(1000))
                    answer = received(client)
                    break
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize("word", ["zz" * 32, "ab" * 31, "ab" * 33])
def test_line_without_a_key_is_named(tmp_path, word):
    path = tmp_path / "enrolled"
    path.write_text(start := f"# clients\n\n{'ab' * 32} first\n  # no key\n{'CD' * 32}#second\n")
    assert read_enrolled(path) == [b"\xab" * 32, b"\xcd" * 32]
    path.write_text(f"{start}{word} third\n")
    refused("line 6: expected 64 hexadecimal digits, got", read_enrolled, path)


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("new-key", lambda path: trust.public_bytes(trust.load_key(path))),
        ("new-key-server", lambda path: load_secret(path)[1].public_key().public_bytes_raw()),
    ],
)
def test_commands_print_public_keys_and_replace_nothing(tmp_path, name, public):
    path = tmp_path / "secret"
    assert command(name, path) == (0, public(path).hex())
    content = path.read_bytes()
    code, output = command(name, path)
    assert code == 2
    assert "exists and is not replaced" in output
    assert path.read_bytes() == content


def test_servers_say_in_one_line_why_they_do_not_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other").write_text("something else")
    Path("empty").write_text("")
    for name, secret, message in (
        ("shuffling-server", "none", "No such file.*none"),
        ("shuffling-server", "other", "other holds no private key"),
        ("key-server", "other", "new-key-server makes one"),
    ):
        code, output = command(name, "--secret", secret, "--enrolled", "empty", "--token", "other")
        assert code == 2
        assert re.fullmatch(f"fedntk.trust: .*{message}.*", output)
