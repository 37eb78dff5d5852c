"""What ``torch.distributed.checkpoint`` does with optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


@functools.cache
def ask_before_states_by_name(check: Callable[[Optimizer], None]) -> None:
    """Call a function with each optimizer that ``torch.distributed.checkpoint.state_dict`` is about to get or set.

    What comes first in either case is to let the optimizer make its states. Neither asks the optimizer whether its
    parameters are the model's, nor calls anything of an optimizer's before it fails where they are not.

    Args:
        check: May raise. Called from the first call with it on, for the rest of the process.
    """
    from torch.distributed.checkpoint import state_dict  # takes long where nothing has been compiled yet

    module: Any = state_dict
    make_states = module._init_optim_state

    @functools.wraps(make_states)
    def check_and_make_states(optim: Optimizer, *args: Any, **kwargs: Any) -> Any:
        check(optim)
        return make_states(optim, *args, **kwargs)

    module._init_optim_state = check_and_make_states
