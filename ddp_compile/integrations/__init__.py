"""Training frameworks that construct DistributedDataParallel themselves, and torchft, one module for each.

Importing ``ddp_compile`` imports none of them, since most import their framework.
"""
