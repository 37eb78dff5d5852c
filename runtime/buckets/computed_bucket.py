"""A bucket as a compiled backward has computed it, before AccumulateGrad has seen its gradients; see `early_launch`."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.gradients import drop_gradients, set_gradient
from ddp_compile.runtime.comm import streams


class ComputedBucket:
    """The gradients of one bucket, as a graph computed them in this iteration; it is launched with them.

    Unless hooks observe the gradients, it removes ``.grad``, since AccumulateGrad stores a gradient unchanged only if
    there is none before. `restore_gradients` brings it back when the iteration ends.

    Args:
        gradients: What the graph returns for them.
        is_observed: Whether hooks see the gradients; see Note [Observed gradients].
        compares_values: Whether hooks may write into the gradients in a way that neither address nor version shows.
        moved: What was computed, if the graph returns other tensors. It is gone after the launch.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Tensor],
        is_observed: bool,
        compares_values: bool,
        moved: Sequence[Tensor] | None = None,
    ) -> None:
        self.late: set[int] = set()  #: parameters that got another contribution after the launch
        self.is_lost = False  #: whether this rank's own gradients are gone
        self._before = bucket.gradients()
        self._bucket = bucket
        self._is_observed = is_observed
        self._moved = moved
        self._is_compared = False
        # Aliases, since the engine must be able to steal the gradients themselves.
        self._aliases = [gradient.detach() for gradient in gradients]
        self._versions: list[int] = []
        self.watch()
        self._values = [alias.clone() for alias in self._aliases] if compares_values else None
        self._comparisons: list[tuple[int, Tensor]] = []  # of values: position, and whether they are equal
        if not self._is_observed:
            drop_gradients(bucket.parameters)

    def watch(self) -> None:
        """Notice all changes of the gradients from now on; only the engine should touch them."""
        self._versions = [alias._version for alias in self._aliases]

    def contributions(self) -> list[Tensor]:
        """What the launch sends: the gradients, plus the ``.grad`` that earlier backwards left."""
        bucket = self._bucket
        if not self._is_observed and bucket.buffer.holds_zeros(self._before):
            # After zero_grad(set_to_none=False) there is nothing to add, and ``.grad`` will be the same views again.
            self._before = [None] * len(self._before)
        if self._moved is not None:
            moved, self._moved, self.is_lost = self._moved, None, True
            return _sums(self._before, moved)
        # The flat buffer will be overwritten, and these gradients are needed if the bucket is launched again.
        before = [old.clone() if old is not None and bucket.buffer.holds(old) else old for old in self._before]
        if self._is_observed:
            self._before = [None] * len(before)
            for position, old in enumerate(before):
                set_gradient(bucket.parameters[position], old)
        else:
            self._before = before
        return _sums(before, self._aliases)

    def expect_another_launch(self) -> None:
        """Count it as launched too early, whatever arrives."""
        self.late.update(self._bucket.param_indices)
        self._is_compared = True

    def arrive(self, index: int) -> None:
        """AccumulateGrad has stored a gradient. A second one is late.

        A batch of hooks may have counted the first one already; `compare` finds any difference in it.
        """
        if self._bucket.arrive_all((index,)):
            self.late.add(index)
            # The bucket's means, which lack it, may have been handed over.
            self.is_lost = self.is_lost or self._bucket.iteration.own is not None

    def compare(self) -> list[Tensor]:
        """Find the parameters whose ``.grad`` is not the computed gradient, or has more added to it.

        Returns bools of shape (), on the gradients' device. Pass their values to `read`, which completes the search.
        Getting the values makes the host wait for the device, so do it for many buckets at once.
        """
        if not self._is_compared:
            pairs = zip(self._bucket.param_indices, self._bucket.gradients(), strict=True)
            self.late.update(index for i, (index, gradient) in enumerate(pairs) if self._is_another(i, gradient))
        self._is_compared = True
        return [are_equal for _, are_equal in self._comparisons]

    def read(self, are_equal: Iterable[bool]) -> None:
        """Take the values of what `compare` returned."""
        for (position, _), is_equal in zip(self._comparisons, are_equal, strict=True):
            if not is_equal:
                self.late.add(self._bucket.param_indices[position])
        self._comparisons = []

    @property
    def holds_its_own(self) -> bool:
        """Whether this rank still has its complete gradients although the bucket has been launched."""
        if self.is_lost:
            return False
        return not self.late or all(gradient is not None for gradient in self._bucket.gradients())

    def own_gradients(self) -> list[Tensor]:
        """This rank's complete gradients. They may be of another stream, and are read on the current one."""
        gradients = [gradient for gradient in self._bucket.gradients() if gradient is not None]
        streams.used_here([*gradients, *(old for old in self._before if old is not None)])
        return _sums(self._before, gradients)

    def restore_gradients(self) -> None:
        """Restore the ``.grad`` that the iteration began with; the result is copied into it."""
        before, self._before = self._before, [None] * len(self._before)
        for position, old in enumerate(before):
            if old is not None:
                set_gradient(self._bucket.parameters[position], old)
                increment_version(old)  # as if AccumulateGrad had added to it

    def _is_another(self, position: int, gradient: Tensor | None) -> bool:
        """Whether AccumulateGrad has stored another tensor than was computed, or has added to it.

        A compiler may return another tensor object than it computes; both are new and have version 0. If only the
        values can show a change, `read` compares them, so that the host does not wait for the device here.
        """
        if (
            gradient is None
            or gradient.data_ptr() != self._aliases[position].data_ptr()
            or gradient._version != self._versions[position]
        ):
            return True
        if self._values is not None:
            # A copy and not a hash, since a hash that sees signs and permutations takes as much memory to compute.
            are_equal = gradient.isclose(self._values[position], rtol=0, atol=0, equal_nan=True).all()
            self._comparisons.append((position, are_equal))
        return False


def _sums(before: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> list[Tensor]:
    # In this order, since an earlier sparse gradient can be added to a dense one.
    return [new if old is None else new + old for old, new in zip(before, gradients, strict=True)]
