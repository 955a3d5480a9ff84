"""The tuning report, made from recorded results."""

from dataclasses import replace
from pathlib import Path

from penstock.experiments.tuning.record import Applied, TriedConfiguration, TuneRecord, VariantRecord
from penstock.experiments.tuning.search import Final
from penstock.experiments.tuning.space import Configuration
from penstock.experiments.tuning.tuning_report import to_markdown, verdict

SHIPPED = Configuration(
    engine="openvino",
    precision="bf16",
    device="cpu",
    instances=2,
    threads=1,
    max_tokens=256,
    max_rows=32,
    max_delay_ms=0,
)
INT8 = replace(SHIPPED, precision="int8")
LARGER = replace(INT8, max_tokens=512)


def final(configuration: Configuration, rate: float, ratio: float, lead: float, **changes: object) -> Final:
    found = Final(
        configuration=configuration,
        rate=rate,
        p99_ms=3200 / rate,
        over_shipped=ratio,
        noise=0.05,
        lead_of_best=lead,
        is_equal=lead <= 1.05,
        is_within=True,
    )
    return found.model_copy(update=changes)


def record(**changes: object) -> TuneRecord:
    found = TuneRecord(
        model="minilm",
        task="embed",
        version="1",
        machine={"cores": "2"},
        started="2026-01-02T03:04:05+00:00",
        seconds=366,
        load={"protocol": "grpc", "concurrency": 32, "items": 1, "data": "auto"},
        min_accuracy=0.98,
        accuracy_measure="mean cosine",
        shipped=SHIPPED,
        variants=[
            VariantRecord(name="openvino int8", accuracy=0.991, measure="mean cosine"),
            VariantRecord(name="onnx int8", accuracy=0.97, measure="mean cosine", left_out="0.97 is below 0.98"),
            VariantRecord(name="onnx fp16 on cuda", left_out="no CUDA here"),
        ],
        tried=[
            TriedConfiguration(configuration=LARGER, windows=11, rate=320, over_shipped=1.6, p99_ms=10),
            TriedConfiguration(configuration=INT8, windows=14, rate=310, over_shipped=1.55, p99_ms=10.3),
            TriedConfiguration(configuration=SHIPPED, windows=20, rate=200, over_shipped=1.0, p99_ms=16),
            TriedConfiguration(
                configuration=replace(SHIPPED, instances=9),
                windows=0,
                rate=0,
                over_shipped=None,
                p99_ms=None,
                failed="no memory",
            ),
        ],
        untried=["onnx fp32, 1×1, 256 tokens, 32 rows, 0 ms: no time left"],
        noise=0.08,
        rounds=9,
        finals=[final(LARGER, 320, 1.6, 1.0), final(INT8, 310, 1.55, 1.03), final(SHIPPED, 200, 1.0, 1.6)],
        winner=INT8,
        best=LARGER,
        changes={"engine": "openvino"},
        applied=Applied(
            version="2",
            new_folder="models/minilm/2",
            files={"models/minilm/model.yaml": "out/before/minilm-model.yaml"},
            diff="--- minilm/model.yaml\n-a: 1\n+a: 2\n",
        ),
    )
    return found.model_copy(update=changes)


def test_the_report_shows_the_winner_the_reason_the_changes_and_how_to_undo_them() -> None:
    text = to_markdown(record())
    for said in (
        "**openvino int8, 2×1, 256 tokens, 32 rows, 0 ms: 1.55 times the throughput of the shipped settings.**",
        "with a mean cosine of at least 0.98, under 32 callers over grpc",
        "The winner reached 310.0/s compared with 200.0/s in 9 rounds: 1.55 times as much in the same rounds",
        "512 tokens, 32 rows, 0 ms was ahead by 3.0%, which is within the noise (5.0%)",
        "converted to int8, as a new version of the model",
        "Version 2 was converted from version 1.",
        "```diff\n--- minilm/model.yaml\n-a: 1\n+a: 2\n```",
        "cp out/before/minilm-model.yaml models/minilm/model.yaml\nrm -r models/minilm/2",
        "| onnx int8 | mean cosine 0.97 | 0.97 is below 0.98 |",
        "| onnx fp16 on cuda |  | no CUDA here |",
        "| openvino bf16, 2×1, 256 tokens, 32 rows, 0 ms | 20 | 200.0 | 1.000 | 16.0 |",
        "9×1, 256 tokens, 32 rows, 0 ms: no memory",
        "Not tried for lack of time:\n\n- onnx fp32, 1×1",
        "The standard deviation of such a ratio was 8.0%",
    ):
        assert said in text, said
    assert "None" not in text


def test_the_report_says_if_the_shipped_configuration_is_best() -> None:
    near = [final(INT8, 204, 1.02, 1.0), final(SHIPPED, 200, 1.0, 1.02)]
    kept = record(winner=SHIPPED, best=INT8, finals=near, changes={}, applied=None)
    assert verdict(kept) == "No other settings were better than yours."
    assert "leads by 2.0%. A lead within 5.0% is noise here, so the shipped settings stay" in to_markdown(kept)
    assert "## What changes\n\nNothing.\n" in to_markdown(kept)
    assert "Nothing was faster" in to_markdown(record(winner=SHIPPED, best=SHIPPED, changes={}, applied=None))


def test_the_report_says_if_a_bound_was_not_met() -> None:
    finals = [final(INT8, 310, 1.5, 1.0, is_within=False), final(SHIPPED, 200, 1.0, 1.5, is_within=False)]
    text = to_markdown(record(p99_ms=5.0, is_met=False, winner=INT8, best=INT8, finals=finals))
    assert "No configuration has a p99 within 5 ms; this one is the closest." in text
    assert "with a p99 of at most 5 ms" in text


def test_the_report_names_a_finalist_over_the_bound() -> None:
    finals = [final(INT8, 310, 1.5, 1.0), final(SHIPPED, 200, 1.0, 1.5, is_within=False)]
    text = to_markdown(record(p99_ms=12.0, best=INT8, finals=finals))
    assert f"- {SHIPPED}: p99 16.0 ms is over 12 ms." in text
    assert "| shipped, over the p99 |" in text


def test_the_report_says_if_the_shipped_configuration_is_too_inaccurate() -> None:
    variants = [VariantRecord(name="openvino bf16", accuracy=0.9, measure="mean cosine", left_out="is below 0.98")]
    assert "could not be chosen" in to_markdown(record(variants=variants))
    assert "could not be chosen" not in to_markdown(record())


def test_the_report_says_that_a_dry_run_or_an_interruption_changed_nothing() -> None:
    assert "The changes were not written into the model." in to_markdown(record(applied=None))
    stopped = record(winner=None, best=None, finals=[], applied=None, changes={}, noise=None)
    assert "**Interrupted: nothing was decided and nothing was changed.**" in to_markdown(stopped)
    assert "The measurements until then are in the report" in to_markdown(stopped)


def test_a_record_survives_saving_and_loading(tmp_path: Path) -> None:
    record().save(tmp_path)
    saved = (tmp_path / "report.json").read_text()
    assert TuneRecord.model_validate_json(saved) == record()
