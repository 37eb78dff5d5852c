"""What the ranks compare and post, so that ranks out of step are found and named."""
