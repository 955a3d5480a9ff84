"""The cache key of a request: its block's id and a strong digest of everything on which the answer depends."""

from hashlib import blake2b

from penstock.core.blocks import BlockDescription
from penstock.core.controls import CONTROL_NAMES
from penstock.core.requests import InferRequest
from penstock.features.cache.cached_answer import FORMAT

DIGEST_BYTES = 32
# Parameters that concern only the encoding of a request or its answer; the model does not get them.
_FORMS = frozenset(
    {
        "binary_data_output",
        "binary_data",
        "binary_data_size",
        "shared_memory_region",
        "shared_memory_offset",
        "shared_memory_byte_size",
        "triton_enable_empty_final_response",
    }
)
_NOT_FOR_THE_MODEL = CONTROL_NAMES | _FORMS


class CacheKeys:
    """Computes the cache keys of one block's requests.

    The digest covers Python's `repr` of everything except tensor bytes (with quotes and brackets, so that different
    requests never give the same text), and then the bytes of the tensors, whose lengths are in that text. Unless the
    block shares its cache, an API key finds only its own answers, because a quick answer would reveal the requests of
    other keys.
    """

    def __init__(self, block: BlockDescription) -> None:
        # The fingerprint covers the model's files, including model.yaml.
        of_block = repr((FORMAT, block.block_id, block.version, block.fingerprint, block.settings.task))
        self._prefix = make_key_prefix(block.block_id)
        self._is_shared = block.settings.cache.shared
        self._of_block = blake2b(of_block.encode(), digest_size=DIGEST_BYTES)

    def compute_key(self, request: InferRequest) -> bytes:
        digest = self._of_block.copy()
        inputs = request.inputs
        if len(inputs) > 1:
            inputs = sorted(inputs, key=lambda tensor: tensor.name)
        tensors = [(tensor.name, tensor.datatype, tuple(tensor.shape), len(tensor.data)) for tensor in inputs]
        parameters = request.parameters and sorted(
            (name, value) for name, value in request.parameters.items() if not _is_server_parameter(name)
        )
        digest.update(repr((tensors, request.outputs, parameters or [])).encode())
        if request.principal.key_id and not self._is_shared:
            digest.update(repr(request.principal.key_id).encode())
        for tensor in inputs:
            digest.update(tensor.data)
        return self._prefix + digest.digest()


def make_key_prefix(block_id: str) -> bytes:
    return f"{block_id}:".encode()


def _is_server_parameter(name: str) -> bool:
    return name in _NOT_FOR_THE_MODEL or name.startswith("sequence_")
