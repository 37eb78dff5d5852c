"""The benchmark harness: ``python -m ddp_compile bench``."""
