"""A bucket: its gradients, its memory, its state, and the interface of the algorithm that reduces it."""
