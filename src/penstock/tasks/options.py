"""The sections of model.yaml that configure tasks, one section per task."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.core.settings import Section, SharedSettings, VersionFile
from penstock.core.yaml_file import ConflictingValues

TOKENIZER_FILE = "tokenizer.json"  # as transformers names it, in the format of the tokenizers library
LABELS_FILE = "labels.txt"  # one label per line, in the order of the network's output


@dataclass(frozen=True, slots=True)
class TextLimits:
    max_rows: int  # of a batch
    max_tokens: int | None = None  # of a batch, with its padding
    max_request_tokens: int = 262_144


class TextOptions(Section):
    # Longer texts, and longer pairs of a cross-encoder, are truncated, as during training.
    max_length: Annotated[int, Field(ge=4, le=65536)] = 256


class EmbedOptions(TextOptions):
    output: str = "sentence_embedding"  # the network's output that becomes `embedding`


class ScoreOptions(TextOptions):
    """Settings for computing the score of a query and a passage."""

    method: Literal["auto", "cosine", "cross"] = "auto"  # auto: cosine if the network's output is a vector
    output: str = ""  # the network's output; empty: sentence_embedding or logits
    activation: Literal["sigmoid", "none"] = "sigmoid"  # of a cross-encoder


class ClassifyOptions(TextOptions):
    """Settings for the network's input, and for the meaning of its output."""

    input: Literal["auto", "image", "text", "tensor"] = "auto"  # auto: by the shapes of the network's inputs
    output: str = ""  # the network's output; may be empty if there is only one
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"
    top_k: Annotated[int, Field(ge=1, le=1000)] = 1  # labels in an answer, best first
    size: Annotated[int, Field(ge=1, le=4096)] | None = (
        None  # pixels along an image's side; None: as the network declares
    )
    fit: Literal["crop", "stretch", "pad"] = "crop"
    colors: Literal["rgb", "bgr", "gray"] = "rgb"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # of ImageNet, for values from 0 to 1
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)
    max_pixels: Annotated[int, Field(ge=1)] = 25_000_000  # of an input image


class UpscaleOptions(Section):
    scale: Annotated[int, Field(ge=1, le=8)] = 2
    denoise: VersionFile = ""  # the file of a second network, for `mode: denoise`; empty: the model has no such mode
    tile: Annotated[int, Field(ge=32, le=4096)] = 256  # pixels of output along a tile's side
    overlap: Annotated[int, Field(ge=0, le=256)] = 8  # at least the network's receptive field
    max_pixels: Annotated[int, Field(ge=1)] = 25_000_000  # of an input image


class SamplingDefaults(Section):
    """The model's defaults for sampling parameters; None: the default of OpenAI's API."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None


class GenerateOptions(Section):
    max_context: Annotated[int, Field(ge=16)] | Literal["auto"] = (
        "auto"  # tokens of prompt and answer; auto: the model's
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # per answer; None: limited by the context
    max_running: Annotated[int, Field(ge=1, le=4096)] = 32  # sequences at once
    defaults: SamplingDefaults = SamplingDefaults()


class TaskSettings(SharedSettings):
    """The part of model.yaml that tasks read. A task's section has the name of the task."""

    engine: str = "onnx"
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it; for a task or an engine of a package
    embed: EmbedOptions = EmbedOptions()
    score: ScoreOptions = ScoreOptions()
    classify: ClassifyOptions = ClassifyOptions()
    upscale: UpscaleOptions = UpscaleOptions()
    generate: GenerateOptions = GenerateOptions()

    @property
    def text_options(self) -> TextOptions | None:
        """Return the settings of the model's task if it is a text task, otherwise None."""
        section = getattr(self, self.task, None)
        return section if isinstance(section, TextOptions) else None

    @model_validator(mode="after")
    def _check_overlap(self) -> "TaskSettings":
        if self.upscale.overlap * 2 >= self.upscale.tile:
            raise ConflictingValues(
                "upscale.overlap must be less than half of upscale.tile", "upscale.overlap", "upscale.tile"
            )
        return self
