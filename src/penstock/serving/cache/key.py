"""The key of a request's answer: its block, and a strong digest of all that its answer depends on."""

from hashlib import blake2b

from penstock.core.blocks import BlockDescription
from penstock.core.requests import InferRequest
from penstock.serving.cache.entry import FORMAT
from penstock.serving.controls import NAMES

DIGEST_BYTES = 32
# Parameters about the form of a request or its answer: the model never sees them.
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
_NOT_FOR_THE_MODEL = NAMES | _FORMS


class KeyMaker:
    """Makes the keys of one block.

    What is not bytes goes into the digest as Python writes it: quoted and bracketed, so that no two requests are
    written alike. Bytes follow, each with its length before them. Who has a key finds its own answers alone: how soon
    an answer comes would tell what others ask.
    """

    def __init__(self, block: BlockDescription) -> None:
        # All else that shapes its answers is in files that the fingerprint is of, model.yaml among them.
        of_block = repr((FORMAT, block.block_id, block.version, block.fingerprint, block.settings.task))
        self._prefix = key_prefix(block.block_id)
        self._is_shared = block.settings.cache.shared
        self._of_block = blake2b(of_block.encode(), digest_size=DIGEST_BYTES)

    def key(self, request: InferRequest) -> bytes:
        digest = self._of_block.copy()
        inputs = request.inputs
        if len(inputs) > 1:
            inputs = sorted(inputs, key=lambda tensor: tensor.name)
        tensors = [(tensor.name, tensor.datatype, tuple(tensor.shape), len(tensor.data)) for tensor in inputs]
        parameters = request.parameters and sorted(
            (name, value) for name, value in request.parameters.items() if not _is_ours(name)
        )
        digest.update(repr((tensors, request.outputs, parameters or [])).encode())
        if request.principal.key_id and not self._is_shared:
            digest.update(repr(request.principal.key_id).encode())
        for tensor in inputs:
            digest.update(tensor.data)
        return self._prefix + digest.digest()


def key_prefix(block_id: str) -> bytes:
    """What all keys of a block begin with."""
    return f"{block_id}:".encode()


def _is_ours(name: str) -> bool:
    return name in _NOT_FOR_THE_MODEL or name.startswith("sequence_")
