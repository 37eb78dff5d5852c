"""Times and names in texts for people."""

from __future__ import annotations


def format_ms(seconds: float | None, unit: str = " ms") -> str:
    """Milliseconds with two digits, or all of them: ``"41 ms"``, ``"0.52 ms"``, ``"1234 ms"``; ``"unknown"``."""
    if seconds is None:
        return "unknown"
    ms = 1e3 * seconds
    return f"{ms:.0f}{unit}" if abs(ms) >= 9.95 else f"{round(ms, 2):.2g}{unit}"


def shorten(name: str, longest: int = 48) -> str:
    """A name in at most so many characters: its two ends."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
