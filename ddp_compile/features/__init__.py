"""What can be added to plain data parallelism, one file each."""
