"""Events of a cluster: the commands that show events, and the triggers that events call."""
