"""Which variants answer as the original does: measured before any of them is served."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.core.errors import ConfigError, PenstockError
from penstock.experiments.tuning.model import TuneModel
from penstock.experiments.tuning.record import VariantRecord
from penstock.experiments.tuning.space import Variant
from penstock.models.convert.fidelity import Fidelity, Reference, Rule, rule_of
from penstock.models.convert.publish import read_report
from penstock.models.convert.samples import collect
from penstock.models.loading import load_model

SHARE = 2  # every other sample of what quantizing measures: enough to tell, in half the time


def floor_of(model: TuneModel, asked: float | None) -> tuple[Rule, float]:
    rule = rule_of(model.folder.settings.task)
    return rule, rule.floor if asked is None else asked


def check_variants(
    model: TuneModel, variants: Sequence[Variant], asked: float | None, tell: Callable[[str], None]
) -> dict[Variant, VariantRecord]:
    """One alone is held against the original where an accuracy is asked for; a converted one was, when it was made."""
    shipped = model.shipped().variant
    _, floor = floor_of(model, asked)
    if model.is_converted:
        return {shipped: _judged(shipped, _as_made(model), floor)}
    if len(variants) < 2 and asked is None:
        return {each: VariantRecord(name=str(each)) for each in variants}
    original = Variant("torch" if shipped.engine == "torch" else "onnx", "fp32")
    tell(f"the original's answers ({original})")
    try:
        with load_model(model.file(original)) as loaded:
            task = model.folder.settings.task
            samples = collect(task, loaded.task, None)
            some = replace(samples, held_out=[group[::SHARE] for group in samples.held_out])
            reference = Reference(task, loaded, some)
    except PenstockError as error:
        problem = f"its accuracy cannot be measured: {error.message}"
        return {each: VariantRecord(name=str(each), left_out="" if each == shipped else problem) for each in variants}
    return {each: _check(model, each, reference, floor, tell) for each in variants}


def _check(
    model: TuneModel, variant: Variant, reference: Reference, floor: float, tell: Callable[[str], None]
) -> VariantRecord:
    tell(f"accuracy of {variant}")
    try:
        with load_model(model.file(variant)) as loaded:
            found = reference.compare(loaded)
    except ConfigError as error:
        return VariantRecord(name=str(variant), left_out=error.message)
    return _judged(variant, found, floor)


def _judged(variant: Variant, found: Fidelity | None, floor: float) -> VariantRecord:
    if found is None:
        return VariantRecord(name=str(variant))
    unit = f" {found.unit}" if found.unit else ""
    below = f"{found.measure} {found.value:g}{unit} is below {floor:g}{unit}" if found.value < floor else ""
    return VariantRecord(
        name=str(variant), accuracy=found.value, measure=found.measure, unit=found.unit, left_out=below
    )


def _as_made(model: TuneModel) -> Fidelity | None:
    """What the version's own report says: the file alone does not tell what it was made of."""
    accuracy = (read_report(model.folder.path, model.version) or {}).get("accuracy")
    if not isinstance(accuracy, dict) or not isinstance(accuracy.get("value"), int | float):
        return None
    return Fidelity(
        str(accuracy.get("measure", "")), accuracy["value"], accuracy.get("samples", 0), unit=accuracy.get("unit", "")
    )
