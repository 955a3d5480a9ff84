"""Silero VAD as its package's own wrapper runs it, with the state of a stream kept by session."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime

from penstock.core.errors import EngineFailed, InvalidRequest, InvalidTensor

# By sample rate: the samples of a window, and those of the window before that the network sees again.
SIZES = {16_000: (512, 64), 8_000: (256, 32)}
LOUDEST = 2.0  # a little above 1 is what resampling makes of loud audio; far above are 16-bit samples


class Stream:
    """One stream of audio, between two of its pieces."""

    def __init__(self, sample_rate):
        self.sample_rate = sample_rate
        self.state = np.zeros((2, 1, 128), np.float32)
        self.context = np.zeros(SIZES[sample_rate][1], np.float32)
        self.rest = np.zeros(0, np.float32)  # samples of a window that is not full yet


class Model:
    def __init__(self, context):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = context.threads
        options.inter_op_num_threads = 1
        self.network = onnxruntime.InferenceSession(find_network(), options, providers=["CPUExecutionProvider"])

    def infer(self, inputs, context):
        audio = check_audio(inputs["audio"])
        sample_rate = check_rate(context.parameters.get("sample_rate", 16_000))
        stream = context.session.setdefault("stream", Stream(sample_rate))
        if stream.sample_rate != sample_rate:
            raise InvalidRequest(
                f"the session began with sample_rate {stream.sample_rate}; begin another for {sample_rate}"
            )
        return {"speech": self.hear(stream, audio)}

    def hear(self, stream, audio):
        size, overlap = SIZES[stream.sample_rate]
        samples = np.concatenate([stream.context, stream.rest, audio])
        count = (len(samples) - overlap) // size
        speech = np.empty(count, np.float32)
        state = stream.state
        rate = np.array(stream.sample_rate, np.int64)
        for index in range(count):
            window = samples[index * size : index * size + overlap + size]
            found, state = self.network.run(None, {"input": window[None], "state": state, "sr": rate})
            speech[index] = found[0, 0]
        # All at once, and last: a request that fails has not happened.
        stream.state = state
        stream.context = samples[count * size : count * size + overlap].copy()
        stream.rest = samples[count * size + overlap :].copy()
        return speech


def check_audio(audio):
    if not np.isfinite(audio).all():
        raise InvalidTensor("audio has a sample that is not a number")
    loudest = np.abs(audio).max(initial=0)
    if loudest > LOUDEST:
        raise InvalidTensor(f"audio has a sample of {loudest:g}; they go from -1 to 1: divide 16-bit samples by 32768")
    return audio


def check_rate(sample_rate):
    if sample_rate not in SIZES:
        raise InvalidRequest(f"sample_rate {sample_rate} is not heard; send audio at {' or '.join(map(str, SIZES))}")
    return int(sample_rate)


def find_network():
    """In the package, which is not imported: that would import torch."""
    found = find_spec("silero_vad")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "data", "silero_vad.onnx")
        if file.is_file():
            return file
    raise EngineFailed(
        "its network is in a package that is not installed; run `pip install --no-deps silero-vad`, then "
        "`penstock model load voice`"
    )
