"""llama.cpp's HTTP server as a program: prints its address, and ends when its standard input ends.

python -m benchmarks.suite.generation.llama <model.gguf> <requests at a time> <tokens of each> <threads>
"""

import sys

import xllamacpp


def main() -> None:
    file, parallel, context, threads = sys.argv[1], *(int(word) for word in sys.argv[2:])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_parallel, parameters.n_ctx = parallel, parallel * context
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
