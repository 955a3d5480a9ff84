"""Direct sessions: which worker a client goes to, and the token that opens its door."""
