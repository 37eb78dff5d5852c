"""Commands of ``python -m ddp_compile`` other than the benchmark, a file each."""
