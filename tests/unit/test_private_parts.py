"""Private parts of libraries are used in one module per library, whose tests fail if a new version changes them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
# By private module, or module with private parts: the file that may import it, and the test of what that file uses.
ADAPTERS = {
    "uvicorn.protocols": ("endpoints/uvicorn_internals.py", "endpoints/http/test_library_internals.py"),
    "asyncio.sslproto": ("endpoints/http/handshake.py", "endpoints/http/test_library_internals.py"),
    "grpc._cython": ("wire/grpc_listener/grpc_server.py", "wire/grpc_listener/test_grpc_server.py"),
    "grpc.aio": ("wire/grpc_listener/grpc_server.py", "wire/grpc_listener/test_grpc_server.py"),
    "prometheus_client.mmap_dict": ("telemetry/prometheus_internals.py", "telemetry/test_prometheus_internals.py"),
    "prometheus_client.values": ("telemetry/prometheus_internals.py", "telemetry/test_prometheus_internals.py"),
    "pygrpc_native": ("gateway/native_grpc/native_server.py", "gateway/native_grpc/test_native_server.py"),
    "torch.utils": ("engines/torch/export.py", "engines/torch/test_torch_files.py"),
    "zmq.backend": ("wire/sockets.py", "wire/test_sockets.py"),
}
TCP_INFO = ("wire/tcp_connections.py", "wire/test_tcp_connections.py")  # the offsets of the kernel's figures
PARTLY_PUBLIC = ("grpc.aio", "torch.utils")  # only names with an underscore are private
DOCUMENTED = {"os._exit"}  # documented in spite of the underscore


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in PACKAGE.rglob("*.py"):
        if "pb" not in file.parts:
            yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the imports from other packages: the name in the module, and the dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("penstock", "__")):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def adapter_of(dotted: str) -> str:
    """Return the file that may import this name; empty if it is public, "none" if it is private without an adapter."""
    has_underscore = any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))
    for module, (file, _) in ADAPTERS.items():
        if dotted.startswith(module) and (has_underscore or module not in PARTLY_PUBLIC):
            return file
    return "none" if has_underscore else ""


def test_private_modules_are_imported_in_their_adapter_only() -> None:
    used = set()
    for file, tree in modules():
        for _, dotted in imported(tree):
            adapter = adapter_of(dotted)
            assert adapter in ("", file), (
                f"{file} imports {dotted}, which is private: move it to an adapter ({adapter})"
            )
            used.add(adapter)
    assert used - {""} == {file for file, _ in ADAPTERS.values()}, "every listed adapter imports a private part"


def test_private_attributes_of_imported_objects_are_used_in_adapters_only() -> None:
    adapters = {file for file, _ in ADAPTERS.values()}
    for file, tree in modules():
        names = dict(imported(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                of = ast.unparse(node.value).partition(".")[0]
                if of in names and ast.unparse(node) not in DOCUMENTED:
                    assert file in adapters, f"{file}:{node.lineno} uses {ast.unparse(node)}: move it to an adapter"


def test_every_adapter_has_its_tests() -> None:
    for file, test in (*ADAPTERS.values(), TCP_INFO):
        assert (PACKAGE / file).is_file(), file
        assert (ROOT / "tests" / "unit" / test).is_file(), test


def test_one_file_knows_the_offsets_in_tcp_info() -> None:
    found = [file for file, tree in modules() if "IPPROTO_TCP, socket.TCP_INFO" in ast.unparse(tree)]
    assert found == [TCP_INFO[0]]
