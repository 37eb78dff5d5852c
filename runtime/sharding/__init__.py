"""Buckets whose gradients are reduced to shards, and whose parameters are gathered from them."""
