"""Training frameworks that would construct DistributedDataParallel by themselves: one module for each.

None is imported with ``ddp_compile``; each imports its framework.
"""
