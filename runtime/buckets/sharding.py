"""What only a sharded optimizer does differently with parameters and gradients."""

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Parameter

from ddp_compile.runtime.comm.step_records import NoRecords

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.bucket import Bucket


class Sharding:
    """How gradients are handed over and parameters are read, if every rank has all of them.

    A sharded optimizer overrides all of it.
    """

    #: Whether parameters may still be written when a forward begins, so that graphs are compiled with waits.
    gathers_parameters: bool = False
    #: The rank that steps all of a parameter, by the parameter's number; the others are cut into a part for each rank.
    owners: Mapping[int, int] = MappingProxyType({})

    def record_into(self, records: NoRecords) -> None:
        """From now on, tell these records of gathers and of waits for them."""

    def backward_begins(self) -> None:
        """A backward has brought its first gradients; inside ``no_sync`` called for each gradient."""

    def hand_over(self, buckets: "Sequence[Bucket]", launched: "Sequence[Bucket]", untouched: Set[int]) -> None:
        """The buckets of an iteration have been reduced: set every ``.grad``.

        ``buckets`` are all of the module, in plan order; the ``launched`` ones have been waited for. Parameters whose
        numbers are in ``untouched`` got no gradient on any rank, and their ``.grad`` does not change.
        """
        for bucket in launched:
            bucket.gradient_store.hand_over(bucket, untouched)

    def holds_gradients(self) -> bool:
        """Whether shards on this rank hold gradients other than zeros, while no ``.grad`` is hidden."""
        return False

    def await_parameters(self, indices: Sequence[int] | None = None) -> None:
        """Return when these parameters are complete, all if None; raises a ReductionError if a rank has not stepped."""

    def forward_ends(self, as_one_graph: bool, has_waited: bool) -> None:
        """A forward with gradients has ended.

        Args:
            as_one_graph: Whether it was one compiled graph, without any Python code of the module.
            has_waited: Whether it waited for all parameters before it read any.
        """

    def refuse_missing_steps(self) -> None:
        """Before an unwrap or a new algorithm, raise a ReplicationError if only some optimizers have stepped."""

    def explain(self) -> list[str]:
        """Lines for ``model.explain()``."""
        return []

    def zero_gradients(self, set_to_none: bool) -> None:
        """Called after the module's own ``zero_grad``, to zero the other gradients."""

    def clip_grad_norm_(
        self, rest: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor | None:
        """See ``ReplicatedModule.clip_grad_norm_``; None if no gradients are sharded."""
        return None

    def full_gradients(self, named: Mapping[str, Parameter]) -> dict[str, Tensor]:
        """See ``ReplicatedModule.full_gradients``."""
        return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


#: For every algorithm except the sharded optimizer's.
NOT_SHARDED = Sharding()
