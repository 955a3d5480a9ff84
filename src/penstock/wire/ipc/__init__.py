"""Messages and tensors between two processes of one machine: a socket, and memory that both have mapped."""
