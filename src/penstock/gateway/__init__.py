"""The protocol edges: each turns its message into one internal request and back."""
