"""What ranks compare and post, so that those out of step are found and named."""
