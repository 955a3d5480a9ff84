"""The inference protocols: each converts its messages to the internal request, and the response back."""
