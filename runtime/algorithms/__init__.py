"""The algorithms: how the ranks communicate. The first line of each file says what is in it.

all_reduce.py, comm_hook.py and what they import are the core. The rest is an extension, imported at its first use; it
imports the names of `ddp_compile.algorithms` alone. To add one, see CONTRIBUTING.md. The sharded optimizer's is in
runtime/sharded.
"""
