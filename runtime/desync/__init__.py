"""What ranks compare and post, so that those that get out of step are found and named."""
