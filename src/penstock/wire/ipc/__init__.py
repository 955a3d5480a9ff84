"""Messages and tensors between two processes of one machine, over a socket and shared memory."""
