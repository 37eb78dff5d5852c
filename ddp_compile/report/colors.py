"""Colors of reports, readable on a light and on a dark background."""

from __future__ import annotations

#: Waits; no bucket has a color like it.
EXPOSED = "#e5484d"
FORWARD = "#8fb0cc"
BACKWARD = "#4f86b8"

# Neighbors differ in hue. All have about the same luminance, so that each stands out from white and from black.
_BUCKETS = (
    *("#2f7fd6", "#b8720a", "#0f8f7c", "#9461d6", "#7a8519", "#c653a4"),
    *("#1f8fb5", "#a3704a", "#3a9440", "#6c70d4"),
)


def bucket_color(index: int) -> str:
    """The color of a bucket in every picture, as ``"#rrggbb"``. Buckets that are ten apart share one.

    Args:
        index: The bucket's position in the plan.
    """
    return _BUCKETS[index % len(_BUCKETS)]
