"""How near a served model's answers are to those of its own file in FP32, on real texts and photographs."""

from penstock.client import Client
from penstock.core.tensors import BYTES, Tensor, from_array, pack_bytes
from penstock.experiments.results import Accuracy
from penstock.experiments.variants import Variants
from penstock.models.convert.fidelity import Answers, answer_all, compare_answers
from penstock.models.loading import load_model
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import mixed
from penstock.tasks.base import TaskRequest

TEXTS = 64
PHOTOS = 3
SEED = 7
MEASURES = {"embed": ("cosine", "cosine", 6), "upscale": ("psnr_db", "PSNR dB", 2)}  # in details, its name, digits


class ServedAccuracy:
    """FP32 answers of each model are made once in this process and one at a time, so that nothing is padded."""

    def __init__(self, variants: Variants) -> None:
        self._variants = variants
        self._expected: dict[str, Answers] = {}

    def compare(self, model: str, address: str) -> Accuracy | None:
        """None for models whose answers have no measure."""
        task = self._variants.folder(model).settings.task
        if task not in MEASURES:
            return None
        if model not in self._expected:
            with load_model(self._variants.original(model)) as original:
                self._expected[model] = answer_all(original, [_requests(task)])
        with Client(address) as client:
            served = _serve(client, task, model)
        found = compare_answers(task, self._expected[model], [[[answer] for answer in served]])
        key, measure, digits = MEASURES[task]
        mean, lowest = (round(found.details[key][name], digits) for name in ("mean", "min"))
        return Accuracy(measure=measure, mean=mean, lowest=lowest, samples=TEXTS if task == "embed" else PHOTOS)


def _requests(task: str) -> list[TaskRequest]:
    if task == "embed":
        return [TaskRequest([Tensor("text", BYTES, (TEXTS,), pack_bytes(mixed(TEXTS, SEED)))], [])]
    return [TaskRequest([Tensor("image", BYTES, (1, 1), pack_bytes([photo]))], []) for photo in photos()[:PHOTOS]]


def _serve(client: Client, task: str, model: str) -> list[Tensor]:
    if task == "embed":
        return [from_array("embedding", client.embed(mixed(TEXTS, SEED), model))]
    return [Tensor("image", BYTES, (1, 1), pack_bytes([client.upscale(each, model)])) for each in photos()[:PHOTOS]]
