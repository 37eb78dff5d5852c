"""The links of a run, with one interface: shaped namespaces, loopback, a single device, and a simulated link."""

from collections.abc import Sequence

from ddp_compile.bench.link import NamespacedLink
from ddp_compile.bench.rank_world import RunningCase
from ddp_compile.validation.rates import Rate


class ShapedLink:
    """Rates of a real link between network namespaces."""

    def __init__(self, namespaces: NamespacedLink, rates: Sequence[Rate]) -> None:
        self.namespaces = namespaces
        self.rates = {str(rate): rate for rate in rates}

    def names(self) -> list[str]:
        return list(self.rates)

    def set_rate(self, name: str, running: Sequence[RunningCase]) -> None:
        self.namespaces.shape(self.rates[name])

    def sent_bytes(self) -> int | None:
        return self.namespaces.sent_bytes(0)


class FixedLink:
    """An existing link, whose rate cannot be changed: "loopback", or "none" for ranks on devices."""

    def __init__(self, name: str) -> None:
        self.name = name

    def names(self) -> list[str]:
        return [self.name]

    def set_rate(self, name: str, running: Sequence[RunningCase]) -> None:
        assert name == self.name

    def sent_bytes(self) -> int | None:
        return None


class SimulatedLink:
    """Rates of a simulated link, see `ddp_compile.bench.simulated_link`."""

    def __init__(self, rates: Sequence[Rate]) -> None:
        self.rates = {f"simulated {Rate(rate.bits_per_second)}": rate for rate in rates}

    def names(self) -> list[str]:
        return list(self.rates)

    def set_rate(self, name: str, running: Sequence[RunningCase]) -> None:
        for case in running:
            case.ask("set_simulated_rate", bits_per_second=self.rates[name].bits_per_second)

    def sent_bytes(self) -> int | None:
        return None
