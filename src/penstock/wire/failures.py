"""Encodes and decodes Penstock's errors."""

from penstock.core.error_text import shorten
from penstock.core.errors import PenstockError, rebuild_error
from penstock.pb.v1 import job_pb2 as pb


def encode_failure(error: PenstockError) -> pb.Failure:
    return pb.Failure(code=error.code, message=shorten(error.message), fields=error.fields)


def decode_failure(failure: pb.Failure) -> PenstockError:
    return rebuild_error(failure.code, failure.message, dict(failure.fields))
