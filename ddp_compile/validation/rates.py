"""Rates and times on the command line: 100gbit, 20us."""

import contextlib
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Self


@dataclass(frozen=True)
class Rate:
    """The rate of a link: 1 mbit to 400 gbit, headers included, or None for a link that is not shaped."""

    bits_per_second: int | None

    def __post_init__(self) -> None:
        if self.bits_per_second is not None and not 10**6 <= self.bits_per_second <= 400 * 10**9:
            limits = "from 10**6 (1mbit) to 400 * 10**9 (400gbit), or None for a link that is not shaped"
            raise ValueError(f"bits_per_second={self.bits_per_second} must be {limits}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The rate of a text such as "100mbit", "2.5gbit" or, for a link that is not shaped, "none", in any case."""
        found = re.fullmatch(r"(?i:none|([0-9]+(?:\.[0-9]+)?)([mg])bit)", text.strip())
        with contextlib.suppress(ValueError):
            if found is not None:
                return cls(int(Decimal(found[1]) * 10 ** {"m": 6, "g": 9}[found[2].lower()]) if found[1] else None)
        raise ValueError(
            f"rate={text!r} must be a number with the unit mbit or gbit, from 1mbit to 400gbit, or none;"
            " pass for example 100mbit, 2.5gbit or none"
        )

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "none"
        digits, unit = (9, "gbit") if self.bits_per_second >= 10**9 else (6, "mbit")
        return f"{(Decimal(self.bits_per_second) / 10**digits).normalize():f}{unit}"


def parse_seconds(text: str) -> float:
    """The seconds of a text such as "20us", "1.5ms" or "2s", above zero; raises a ValueError for any other text."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.strip().lower())
    seconds = float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]] if found else 0.0
    if seconds <= 0:
        raise ValueError(
            f"latency={text!r} must be a number above zero with the unit us, ms or s; pass for example 20us"
        )
    return seconds
