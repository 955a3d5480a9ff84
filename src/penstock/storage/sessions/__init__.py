"""Records of sessions that outlive the gateway which has them."""
