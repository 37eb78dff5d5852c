"""Makes the many small compilations of a test process take less time.

The results do not change, except that inductor's C++ kernels have no vector instructions, unless ``VECTOR_KERNELS=1``
is in the environment, as in ``make test-long``.
"""

import gc
import os
import traceback
from functools import cache
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.guards as dynamo_guards
import torch._dynamo.side_effects as side_effects
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._dynamo.trace_rules as trace_rules
import torch._dynamo.utils as dynamo_utils
import torch._functorch._aot_autograd.graph_compile as graph_compile
import torch._inductor.config as inductor_config
import torch._subclasses.fake_tensor as fake_tensor
from torch._decomp.decompositions_for_rng import PhiloxState
from torch.hub import tqdm

SETTINGS_AS_TEXT = (
    "_get_dynamo_config_for_logging",
    "_compiler_config_for_logging",
    "_scrubbed_inductor_config_for_logging",
    "_functorch_config_for_logging",
)


def make_compiles_cheap() -> None:
    """Avoid work that takes much of the processor time of small graphs but that no test needs (torch 2.13).

    Dynamo empties the processor's caches after each graph to measure how long its guards take, for a metric. The
    garbage collector scans everything that torch has imported again and again: existing objects are now excluded, and
    collections are less frequent. All settings, graphs and call stacks are turned into text for logs that are off. The
    C++ compiler takes three times as long if a kernel has vector instructions. Each init_process_group() makes Dynamo
    look up thousands of torch's functions again, in case torch.distributed was not imported the first time. Stacks are
    kept for every seed, for a GPU that is not there, and for every fake mode. Around each graph, six empty tensors are
    made, by slow traced operations, for random numbers that a backend computes itself. A progress bar that shows
    nothing starts a thread.
    """
    guards: Any = dynamo_guards
    guards.profile_guard_manager = lambda *_: 0.0

    gc.freeze()
    gc.set_threshold(200_000, 20, 50)

    rules: Any = trace_rules
    rules.clear_lru_cache = cache(rules.clear_lru_cache)  # of what was looked up in imports; once

    tqdm.monitor_interval = 0

    empty = torch.empty(0)
    philox: Any = PhiloxState
    philox.reset = lambda self: vars(self).update(
        seed=empty, base_offset=empty, relative_offset=0, offset_advanced_at_least_once=False
    )

    stackless = SimpleNamespace(**{**vars(traceback), "extract_stack": StackSummary, "format_stack": list})
    keeping_stacks: list[Any] = [fake_tensor, torch.cuda, torch.xpu, torch.mtia]
    for module in keeping_stacks:
        module.traceback = stackless

    for name in SETTINGS_AS_TEXT:
        setattr(dynamo_utils, name, lambda: None)
    graphs: Any = graph_compile
    graphs._log_joint_graph = lambda *_: None
    graphs._log_fw_bw_graphs = lambda *_: (None, None)
    # The callers of the function that is compiled; what is inside it stays in messages.
    traced: list[Any] = [symbolic_convert, side_effects]
    for module in traced:
        module.get_stack_above_dynamo = StackSummary

    if os.environ.get("VECTOR_KERNELS") != "1":
        inductor_config.cpp.simdlen = 1
