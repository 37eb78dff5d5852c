"""Buckets: their gradients, memory and state, and the interface of the algorithm that reduces them."""
