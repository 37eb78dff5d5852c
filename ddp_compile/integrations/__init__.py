"""Training frameworks that construct DistributedDataParallel themselves, one module for each.

Importing ``ddp_compile`` imports none of them, since each imports its framework.
"""
