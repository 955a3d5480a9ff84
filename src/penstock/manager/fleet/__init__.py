"""What starts, stops and watches the roles of a cluster on machines."""
