"""The runtime of a replicated module: the reducer, its buckets, and the messages between the ranks."""
