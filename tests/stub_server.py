"""Runs a gRPC server of the inference protocol in this process, whose answers the test provides."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from penstock.pb.inference import grpc_service_pb2_grpc as rpc


@asynccontextmanager
async def stub_serving(service: rpc.GRPCInferenceServiceServicer) -> AsyncIterator[str]:
    """Serve on a free port of loopback; yield the address."""
    server = grpc.aio.server()
    rpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)
