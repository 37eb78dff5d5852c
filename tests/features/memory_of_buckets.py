"""Where the gradients of a bucket lie, by their addresses."""

from __future__ import annotations

from typing import Any

#: More than what a gradient may be padded by in its bucket, in bytes.
PADDING = 128


def assert_in_their_buckets(model: Any) -> None:
    """All gradients of a bucket lie in one buffer."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for bucket in model.bucket_plan.buckets:
        of_bucket = [gradients[spec.fqn] for spec in bucket.gradients]
        begin, end = (f(g.data_ptr() + n * g.nbytes for g in of_bucket) for f, n in ((min, 0), (max, 1)))
        assert end - begin <= sum(g.nbytes + PADDING for g in of_bucket), bucket
