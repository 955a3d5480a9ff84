"""The reports of an experiment: complete, and one page that fetches nothing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.experiments.html_report import to_html
from penstock.experiments.plots import Axis, Chart, Curve, Point
from penstock.experiments.results import Results, read_results
from penstock.experiments.table import to_markdown
from tests.measured import make_cases, make_results, make_text

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Records every tag, the resources that it would load, and whether all tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def results() -> Results:
    cases = make_cases(
        experiment={"batch_sizes": [1, 4]}, matrix={"device": ["cpu", "cuda"], "precision": ["fp32", "int8"]}
    )
    here = [case for case in cases if case.device == "cpu"]
    return make_results({case.id: [100.0 * case.concurrency, 110.0 * case.concurrency] for case in here}, cases=cases)


def test_the_page_loads_nothing(results: Results) -> None:
    text = to_html(results)
    page = Page(text)
    assert page.fetched == []
    assert not {"link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert not re.search(r"https?://|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest", text.replace("// The chosen", ""))


def test_the_page_has_every_plot_and_every_case(results: Results) -> None:
    page = Page(to_html(results))
    sizes, loads, measured = 2, 6, 12
    assert page.tags.count("svg") == sizes + loads + 2 * measured
    assert page.tags.count("polyline") == 2 * sizes + 2 * loads + measured * 2 * 2 * 2  # cpu and memory, roles, repeats
    for word in ("made", "cosine 0.99140 (≥ 0.97750)", "±5%", "has no CUDAExecutionProvider", "minilm onnx int8 cuda"):
        assert word in page.words


def test_texts_of_an_experiment_are_escaped(results: Results) -> None:
    assert "Numbers &lt;b&gt;that&lt;/b&gt; a test chose" in to_html(results)


def test_an_experiment_without_results_has_a_page() -> None:
    assert "Nothing has been measured yet" in Page(to_html(make_results({}))).words


def test_the_markdown_has_all_figures_of_a_case(results: Results) -> None:
    text = to_markdown(results)
    head, row = (
        next(line for line in text.splitlines() if line.startswith(start)) for start in ("| variant", "| minilm")
    )
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in row.split("|")), strict=True))
    assert cells["requests/s"] == "105"
    assert cells["pairs/s"] == "105"
    assert cells["±"] == "±5%"
    assert cells["p99 ms"] == "10.0"
    assert (cells["CPU %"], cells["memory MiB"]) == ("100", "340")
    assert (cells["generator CPU"], cells["steady"]) == ("10%", "yes")
    assert {f"{name} ms" for name in ("p50", "p90", "p95", "p99", "p99.9", "max")} < cells.keys()
    assert "| minilm onnx fp32 cuda | b1 c1, b1 c8, b1 c32, b4 c1, b4 c8, b4 c32 | the installed" in text


def test_pairs_per_second_are_the_batch_size_times_the_requests(results: Results) -> None:
    row = next(line for line in to_markdown(results).splitlines() if line.startswith("| minilm onnx fp32 cpu | 4 | 8"))
    assert row.split(" | ")[3:5] == ["840", "3,360"]


def test_generated_text_has_its_figures_and_plots(results: Results, tmp_path: Path) -> None:
    without = to_html(results)
    for result in results.cases:
        if result.repeats and result.case.batch_size == 1:
            for repeat in result.repeats:
                repeat.generation = make_text(100.0 * result.case.concurrency, 80.0, 20.0)
    page = Page(to_html(results))
    loads = 3
    assert page.tags.count("svg") == Page(without).tags.count("svg") + 2 + 2 * loads
    assert "First token and time between tokens" in page.words
    assert "First token and time between tokens" not in without
    head, row = (
        next(line for line in to_markdown(results).splitlines() if line.startswith(start))
        for start in ("| variant", "| minilm")
    )
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in row.split("|")), strict=True))
    assert (cells["first token p99 ms"], cells["between tokens p50 ms"], cells["tokens/s each"]) == (
        "80.0",
        "20.0",
        "50.0",
    )
    assert (cells["prompt tokens"], cells["goodput/s"]) == ("128", "1.50")
    results.save(tmp_path)
    assert read_results(tmp_path) == results


def test_results_survive_saving_and_loading(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path)
    assert read_results(tmp_path) == results
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    assert json.loads((tmp_path / "results.json").read_text())["format"] == 1


def test_other_files_are_refused_as_results(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the results of an experiment"):
        read_results(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the results"):
        read_results(tmp_path / "nowhere")


@pytest.mark.parametrize("is_log", [False, True])
def test_points_lie_within_their_chart(is_log: bool) -> None:
    points = [Point(x, y, x_range=(x, x * 1.2), y_range=(y * 0.5, y)) for x, y in ((0.5, 3.0), (700.0, 4_321.0))]
    svg = Chart("c", Axis("x"), Axis("y", is_log=is_log), [Curve("s", points)]).draw()
    for x, y in re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', svg):
        assert 66 <= float(x) <= 542
        assert 14 <= float(y) <= 256
    assert svg.count("<circle") == 2
