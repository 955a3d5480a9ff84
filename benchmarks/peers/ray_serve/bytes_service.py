"""The gRPC service of the deployment: bytes in, bytes out. Serve's proxy imports it by name."""

from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import BytesValue

SERVICE = "peer.Model"


def add_to_server(servicer: Any, server: Any) -> None:
    """Add the servicer's handlers like a generated add_…Servicer_to_server; Serve replaces them by its own."""
    handler = grpc.unary_unary_rpc_method_handler(
        servicer.Predict, request_deserializer=BytesValue.FromString, response_serializer=BytesValue.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Predict": handler}),))
