"""Compares gateways behind Envoy ("edge"), gateways without it, and Triton, with TLS and API keys."""

import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from benchmarks.repository import link_model
from benchmarks.suite.access import make_key
from benchmarks.suite.edge_triton import INSTALL, MODEL, TritonServer, find_triton
from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.measure import LoadRow, TableLoad
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, Window, write_messages
from penstock.experiments.load.payloads import build_built_in_payloads, encode
from penstock.experiments.processes import ServerRun
from penstock.models.convert.speed import spread
from penstock.models.samples.noop import NOOP, write_noop
from penstock.wire.credentials.authority import CA_FILE, Authority
from penstock.wire.credentials.client_tls import create_client_context
from penstock.wire.credentials.tls_files import TlsFiles

TEXT = "minilm"
REPORTED = 0.0  # the bar of a figure without a requirement
EDGE, DIRECT, TRITON = "edge", "direct", "triton"
LOADS = (
    TableLoad("noop grpc c1", "grpc", "noop", NOOP, 1),
    TableLoad("noop grpc c32", "grpc", "noop", NOOP, 32),
    TableLoad("noop rest c1", "rest", "noop", NOOP, 1),
    TableLoad("noop rest c32", "rest", "noop", NOOP, 32),
    TableLoad("text grpc c32", "grpc", "mixed", TEXT, 32),
)


class SecuredServer(ServerRun):
    """A server with TLS that requires keys, with a key for its load."""

    def __init__(self, models: Path, folder: Path, files: TlsFiles, edge: str) -> None:
        folder.mkdir(parents=True)
        self._files = files
        tls = {"cert": files.cert, "key": files.key, "ca": files.ca}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump({"edge": edge, "tls": tls, "access": {"keys": "required"}}))
        super().__init__(models, folder, "--config", str(config))
        self.key = make_key(folder / "data")
        self.key_file = folder / "key"
        self.key_file.touch(0o600)
        self.key_file.write_text(self.key)

    def _is_ready(self, http: str) -> bool:
        try:
            context = create_client_context(TlsFiles("", "", self._files.ca))
            with urllib.request.urlopen(f"{http}/v2/health/ready", timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class EdgeBed:
    """Two servers, with and without Envoy, and Triton if it is installed."""

    servers: dict[str, SecuredServer | TritonServer]
    folder: Path
    ca: str

    def places(self, load: TableLoad) -> list[str]:
        """Return the servers that serve this load."""
        is_for_all = (load.protocol, load.kind) == ("grpc", "noop")  # Triton has the no-op only, and TLS for gRPC only
        return [place for place in self.servers if place != TRITON or is_for_all]

    def load(self, place: str, load: TableLoad) -> Generator:
        server, model = self.servers[place], MODEL if place == TRITON else load.model
        file = self.folder / f"{place}-{load.protocol}-{load.kind}"
        if not file.exists():
            write_messages(file, encode(build_built_in_payloads(load.kind, model), load.protocol, server.key))
        target = server.http.removeprefix("https://") if load.protocol == "rest" else server.grpc
        spec = LoadSpec(
            load.protocol, target, str(file), load.concurrency, key_file=str(server.key_file), tls=("", "", self.ca)
        )
        return Generator(spec)


def measure_edge(
    models: Path, rounds: int, window_s: float, warm_up_s: float, say: Callable[[str], None]
) -> tuple[list[SuiteFigure], dict[str, LoadRow]]:
    """Measure the servers with and without Envoy in turns. `models` is the shipped repository."""
    if (triton := find_triton()) is None:
        say(f"edge_noop_grpc_over_triton is omitted, because Triton is not installed ({INSTALL} installs it)")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, _make_bed(models, Path(name), triton) as bed:
        rows = {
            f"{load.name} {place}": row
            for load in LOADS
            for place, row in _measure(bed, load, rounds, window_s, warm_up_s).items()
        }
    for name, row in rows.items():
        tail = f"p50 {row.percentile_ms(50):.2f} ms, p99 {row.percentile_ms(99):.2f} ms"
        say(f"  {name}: {median(row.rps):,.0f}/s, {tail}")
    return [*_make_figures(rows)], rows


@contextmanager
def _make_bed(models: Path, folder: Path, triton: Path | None) -> Iterator[EdgeBed]:
    repository = folder / "models"
    write_noop(repository / NOOP)
    link_model(models / TEXT, repository / TEXT)
    authority = Authority.create(folder / "certs", "the benchmark's authority", 10)
    authority.issue("server", ("localhost", "127.0.0.1"), is_client=False)
    certs = folder / "certs"
    files = TlsFiles(str(certs / "server.pem"), str(certs / "server-key.pem"), str(certs / CA_FILE))
    with ExitStack() as stack:
        servers: dict[str, SecuredServer | TritonServer] = {
            place: stack.enter_context(SecuredServer(repository, folder / place, files, edge))
            for place, edge in ((EDGE, "envoy"), (DIRECT, "none"))
        }
        if triton is not None:
            server = TritonServer(triton, repository / NOOP / "1", folder / TRITON, files)
            servers[TRITON] = stack.enter_context(server)
        yield EdgeBed(servers, folder, files.ca)


def _measure(bed: EdgeBed, load: TableLoad, rounds: int, window_s: float, warm_up_s: float) -> dict[str, LoadRow]:
    rows = {place: LoadRow(load.concurrency) for place in bed.places(load)}
    with ExitStack() as stack:
        loads = {place: stack.enter_context(bed.load(place, load)) for place in rows}
        for number in range(rounds):
            for place in sorted(loads, reverse=number % 2 == 1):
                before = bed.servers[place].cpu_s()
                outcome = loads[place].run(Window(window_s, load.concurrency, 0.0, warm_up_s))
                after = bed.servers[place].cpu_s()
                rows[place].add(outcome, {role: after[role] - before.get(role, 0.0) for role in after})
    return rows


def _make_figures(rows: dict[str, LoadRow]) -> Iterator[SuiteFigure]:
    def rps(load: str) -> tuple[list[float], list[float]]:
        return rows[f"{load} {EDGE}"].rps, rows[f"{load} {DIRECT}"].rps

    yield ratio("edge_grpc_over_grpcio", *rps("noop grpc c32"), 1.8)
    yield ratio("edge_rest_over_direct", *rps("noop rest c32"), 0.6)
    yield ratio("edge_text_over_direct", *rps("text grpc c32"), 0.97)
    if beside := rows.get(f"noop grpc c32 {TRITON}"):
        yield ratio("edge_noop_grpc_over_triton", rows[f"noop grpc c32 {EDGE}"].rps, beside.rps, REPORTED)
    for protocol in ("grpc", "rest"):
        yield _compute_added_ms(f"edge_added_p50_ms_{protocol}", rows, f"noop {protocol} c1")


def _compute_added_ms(key: str, rows: dict[str, LoadRow], load: str) -> SuiteFigure:
    """Return the milliseconds that the edge adds to the p50 of one caller."""
    with_edge, without = (rows[f"{load} {place}"].percentiles_ms for place in (EDGE, DIRECT))
    added = [one[50] - other[50] for one, other in zip(with_edge, without, strict=True)]
    return SuiteFigure(
        key, median(added), spread([1 + each for each in added]), 0.5, is_ceiling=True, rounds=len(added)
    )
