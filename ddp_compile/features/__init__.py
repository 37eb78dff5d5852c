"""Features beyond plain data parallelism, one file each."""
