"""A bare grpc.aio echo server: the cost of an endpoint without a server behind it."""

import subprocess
import sys

import grpc
import uvloop

from penstock.experiments.processes import ChildProcess


class EchoRun(ChildProcess):
    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.suite.echo"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.target = f"127.0.0.1:{int(self.process.stdout.readline())}"


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(_echo)


async def _echo(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return message


async def _serve() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve())
