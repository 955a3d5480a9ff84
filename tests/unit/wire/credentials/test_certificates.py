"""TLS at ports and in channels: trust, renewal without a restart, and refusals."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.core.errors import ConfigError
from penstock.wire.channels import Channels
from penstock.wire.credentials.authority import CA_FILE, Authority
from penstock.wire.credentials.certificate_names import read_call_names, read_transport_names
from penstock.wire.credentials.certificates import Certificates, ClientAuth
from penstock.wire.credentials.client_tls import create_client_context
from penstock.wire.credentials.tls_files import NO_FILES, TlsFiles

METHOD = "/test.Echo/Names"


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create(folder, "a test's authority", 10)
        self.issue("server", "localhost", "127.0.0.1")
        self.authority.issue("alice@example.com", is_client=True)

    def issue(self, name: str, *hosts: str) -> bytes:
        return self.authority.issue(name, hosts).cert.read_bytes()

    def files(self, name: str = "", ca: str = CA_FILE) -> TlsFiles:
        cert, key = (str(self.folder / f"{name}{end}.pem") if name else "" for end in ("", "-key"))
        return TlsFiles(cert, key, str(self.folder / ca))

    def server(self, client_auth: ClientAuth = "none") -> Certificates:
        return Certificates(self.files("server"), client_auth)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "certs")


@asynccontextmanager
async def serving(certificates: Certificates, **options: Any) -> AsyncIterator[str]:
    async def answer(request: bytes, context: Any) -> bytes:
        return ",".join(read_call_names(context.auth_context())).encode()

    server = grpc.aio.server()
    handlers = {"Names": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = certificates.add_port(server, "127.0.0.1:0", **options)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(files: TlsFiles, address: str) -> str:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with Channels(tls=files).open(address, options) as channel:
        answer: bytes = await channel.unary_unary(METHOD)(b"", timeout=5)
        return answer.decode()


@asynccontextmanager
async def serving_http(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Answer each line with the names of the caller's certificate."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(",".join(read_transport_names(writer.transport)).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask_http(context: ssl.SSLContext, port: int) -> tuple[str, dict[str, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"who am I\n")
        answer = (await reader.readline()).decode()
        if not answer:
            raise ConnectionError("it was closed, without an answer")
        return answer.strip(), writer.get_extra_info("ssl_object").getpeercert()
    finally:
        writer.close()


async def test_a_port_with_a_certificate_refuses_plain_connections(world: World) -> None:
    async with serving(world.server()) as address:
        assert await ask(world.files(), address) == ""
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(NO_FILES, address)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_authority_is_not_trusted(world: World, tmp_path: Path) -> None:
    stranger = World(tmp_path / "stranger")
    async with serving(stranger.server()) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(world.files(), address)
    async with serving_http(stranger.server().create_server_context()) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask_http(create_client_context(world.files()), port)


async def test_a_server_with_another_name_is_not_trusted(world: World) -> None:
    world.issue("server", "elsewhere.example")
    async with serving(world.server()) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(world.files(), address)


async def test_callers_are_identified_by_their_certificates(world: World, tmp_path: Path) -> None:
    stranger = World(tmp_path / "stranger")
    alice, wrong = world.files("alice@example.com"), stranger.files("alice@example.com")
    wrong = TlsFiles(wrong.cert, wrong.key, str(world.folder / CA_FILE))
    certificates = world.server("required")
    async with serving(certificates) as address, serving_http(certificates.create_server_context()) as port:
        assert await ask(alice, address) == "alice@example.com"
        assert (await ask_http(create_client_context(alice), port))[0] == "alice@example.com"
        for caller in (world.files(), wrong):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(caller, address)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask_http(create_client_context(caller), port)


async def test_an_optional_certificate_can_be_left_out_but_not_be_wrong(world: World, tmp_path: Path) -> None:
    stranger = World(tmp_path / "stranger").files("alice@example.com")
    wrong = TlsFiles(stranger.cert, stranger.key, str(world.folder / CA_FILE))
    async with serving_http(world.server("optional").create_server_context()) as port:
        assert (await ask_http(create_client_context(world.files("alice@example.com")), port))[0] != ""
        assert (await ask_http(create_client_context(world.files()), port))[0] == ""
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask_http(create_client_context(wrong), port)


async def test_new_files_are_used_without_a_restart(world: World) -> None:
    certificates, alice = world.server("required"), world.files("alice@example.com")
    context = create_client_context(alice)
    async with serving(certificates) as address, serving_http(certificates.create_server_context()) as port:
        shown = [await served(address, context), (await ask_http(context, port))[1]["serialNumber"]]
        assert shown[0] == shown[1]
        assert not certificates.reload()
        world.issue("server", "localhost", "127.0.0.1")
        assert certificates.reload()
        assert certificates.generation == 1
        renewed = [await served(address, context), (await ask_http(context, port))[1]["serialNumber"]]
        assert renewed[0] == renewed[1] != shown[0]
        assert await ask(alice, address) == "alice@example.com"


async def test_a_new_authority_is_trusted_without_a_restart(world: World, tmp_path: Path) -> None:
    """The former authority is no longer trusted."""
    other = World(tmp_path / "other")
    certificates = world.server("required")
    bob = other.files("alice@example.com")
    bob_there = TlsFiles(bob.cert, bob.key, str(world.folder / CA_FILE))
    async with serving(certificates) as address, serving_http(certificates.create_server_context()) as port:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(bob_there, address)
        contexts = create_client_context(world.files("alice@example.com")), create_client_context(bob_there)
        trusted = (world.folder / CA_FILE).read_bytes()
        (world.folder / CA_FILE).write_bytes((other.folder / CA_FILE).read_bytes())
        assert certificates.reload()
        (tmp_path / "trusted.pem").write_bytes(trusted)
        assert (await ask_http(contexts[1], port))[0] == "alice@example.com"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask_http(contexts[0], port)
        there = TlsFiles(bob.cert, bob.key, str(tmp_path / "trusted.pem"))
        assert await ask(there, address) == "alice@example.com"


async def test_mismatched_files_change_nothing_until_they_match(world: World) -> None:
    certificates, caller = world.server(), world.files()
    key = world.folder / "server-key.pem"
    async with serving(certificates) as address:
        old = key.read_bytes()
        world.issue("server", "localhost", "127.0.0.1")
        new = key.read_bytes()
        key.write_bytes(old)
        assert not certificates.reload()
        assert await ask(caller, address) == ""
        key.write_bytes(new)
        assert certificates.reload()
        key.unlink()
        assert not certificates.reload()
        assert await ask(caller, address) == ""


def test_a_certificate_must_match_at_the_start(world: World) -> None:
    (world.folder / "server.pem").unlink()
    with pytest.raises(ConfigError, match=r"server\.pem cannot be read"):
        world.server()


async def test_only_modern_tls_versions_are_supported(world: World) -> None:
    certificates = world.server()
    async with serving(certificates) as address, serving_http(certificates.create_server_context()) as port:
        for target in (int(address.rpartition(":")[2]), port):
            for greeting in (hello(0x0301), hello(0x0302)):
                answer = await asyncio.to_thread(greet, target, greeting)
                assert answer[:1] in (b"", b"\x15"), "an alert, or the end"
        for target, protocol in ((int(address.rpartition(":")[2]), "h2"), (port, "http/1.1")):
            context = create_client_context(world.files())
            context.set_alpn_protocols([protocol])
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context.minimum_version = context.maximum_version = version
                assert await asyncio.to_thread(negotiated, target, context) == protocol


async def served(address: str, context: ssl.SSLContext) -> str:
    """Return the serial number of the certificate that a gRPC port uses."""

    def look() -> str:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5) as opened:
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(opened, server_hostname="127.0.0.1") as shown:
                found = shown.getpeercert()
                assert found is not None
                return str(found["serialNumber"])

    return await asyncio.to_thread(look)


def negotiated(port: int, context: ssl.SSLContext) -> str | None:
    with (
        socket.create_connection(("127.0.0.1", port), 5) as opened,
        context.wrap_socket(opened, server_hostname="127.0.0.1") as shown,
    ):
        return shown.selected_alpn_protocol()


def hello(version: int) -> bytes:
    """Return a ClientHello of a version that no installed library speaks."""
    suites = struct.pack(">HHHH", 6, 0x002F, 0xC014, 0xC00A)
    body = struct.pack(">H", version) + bytes(32) + b"\0" + suites + b"\1\0"
    message = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16" + struct.pack(">HH", 0x0301, len(message)) + message


def greet(port: int, greeting: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as opened:
        opened.settimeout(5)
        opened.sendall(greeting)
        try:
            return opened.recv(1024)
        except ConnectionError:
            return b""
