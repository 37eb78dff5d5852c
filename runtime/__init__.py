"""What runs while a replicated module trains: buckets, reducer, agreement between ranks."""
