"""A sharded optimizer."""
