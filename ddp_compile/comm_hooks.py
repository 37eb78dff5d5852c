"""Nothing: says what to write instead of the comm hooks that were here."""

raise ImportError(
    "ddp_compile.comm_hooks is gone: register the hooks of the same names from"
    " torch.distributed.algorithms.ddp_comm_hooks.default_hooks, or pass"
    " algorithm=GradientAllReduce(wire_dtype=torch.bfloat16), which divides and rounds in one pass"
)
