"""What runs while a replicated module trains: the reducer, its buckets, and what the ranks tell each other."""
