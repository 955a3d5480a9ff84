"""What serving costs a model that generates text: the bare engine, Penstock, and llama.cpp on one file."""
