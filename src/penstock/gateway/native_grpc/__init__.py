"""The native gRPC server, with a relay in front of it; README.md says why, when, and how to switch it off."""
