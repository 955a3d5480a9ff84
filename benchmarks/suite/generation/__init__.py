"""The cost of serving generated text: the bare engine, Penstock and llama.cpp with the same file."""
