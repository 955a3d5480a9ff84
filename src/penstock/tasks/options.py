"""What model.yaml says to the tasks, a section each, and what bounds their texts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from penstock.core.settings import Section


@dataclass(frozen=True, slots=True)
class TextLimits:
    max_rows: int  # of a batch
    max_tokens: int | None = None  # of a batch, with its padding
    max_request_tokens: int = 262_144


class TextOptions(Section):
    tokenizer: str = "tokenizer.json"
    # Longer texts, or pairs of a cross-encoder, are cut here, as the model's authors do.
    max_length: Annotated[int, Field(ge=4, le=65536)] = 256


class EmbedOptions(TextOptions):
    output: str = "sentence_embedding"  # the network's output that becomes `embedding`


class ScoreOptions(TextOptions):
    """How a query and a passage become a number."""

    method: Literal["auto", "cosine", "cross"] = "auto"  # auto: cosine where the network gives vectors
    output: str = ""  # the network's output; empty: sentence_embedding or logits
    activation: Literal["sigmoid", "none"] = "sigmoid"  # of a cross-encoder


class ClassifyOptions(TextOptions):
    """What becomes the network's input, and what its output means."""

    input: Literal["auto", "image", "text", "tensor"] = "auto"  # auto: as the network's inputs look
    labels: str = "labels.txt"  # one a line, in the order of the network's output
    output: str = ""  # the network's output; empty: its only one
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"
    top_k: Annotated[int, Field(ge=1, le=1000)] = 1  # labels in an answer, best first
    size: Annotated[int, Field(ge=1, le=4096)] | None = None  # pixels along an image's side; None: as the network says
    fit: Literal["crop", "stretch", "pad"] = "crop"
    colors: Literal["rgb", "bgr", "gray"] = "rgb"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # ImageNet's, of values from 0 to 1
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)
    max_pixels: Annotated[int, Field(ge=1)] = 25_000_000  # of an image that is sent
    max_scans: Annotated[int, Field(ge=1)] = 32  # of a progressive JPEG; most have ten


class UpscaleOptions(Section):
    scale: Annotated[int, Field(ge=1, le=8)] = 2
    denoise: str = ""  # the file of a second network, for `mode: denoise`; empty: the model has no such mode
    tile: Annotated[int, Field(ge=32, le=4096)] = 256  # pixels of output along a tile's side
    overlap: Annotated[int, Field(ge=0, le=256)] = 8  # at least the network's receptive field
    max_pixels: Annotated[int, Field(ge=1)] = 25_000_000  # of the input
    max_scans: Annotated[int, Field(ge=1)] = 32  # of a progressive JPEG; most have ten


class SamplingDefaults(Section):
    """What holds where a request does not say it; None: as OpenAI has it."""

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
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # of an answer; None: as many as the context has room for
    max_running: Annotated[int, Field(ge=1, le=4096)] = 32  # sequences at once
    defaults: SamplingDefaults = SamplingDefaults()
