"""The benchmark harness behind ``python -m ddp_compile bench``."""
