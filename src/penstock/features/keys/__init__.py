"""API keys, session-token keys, certificates and the audit log."""
