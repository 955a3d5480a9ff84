"""The cluster over REST and a WebSocket: what operators and a web page ask of it, at a gateway or a manager."""
