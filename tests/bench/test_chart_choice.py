"""Which rows of a run a chart compares, in which order, and how it names those that failed."""

from __future__ import annotations

from pathlib import Path

from chart_data import CAPS, EAGER, OURS, PEER, USERS, summary_row, write_summary

from ddp_compile.bench.charts.choice import Case, choose_cases, failures, gbit_of, implementation_order, link_order
from ddp_compile.bench.charts.data_files import read_run


def test_links_and_implementations_have_an_order() -> None:
    links = ["none", "10gbit", "loopback", "2.5gbit", "simulated 100gbit", "500mbit", "1 Gbit", "other"]
    expected = ["500mbit", "1 Gbit", "2.5gbit", "10gbit", "simulated 100gbit", "loopback", "none", "other"]
    assert sorted(links, key=link_order) == expected
    assert [gbit_of(link) for link in expected[:5]] == [0.5, 1.0, 2.5, 10.0, 100.0]
    names = ["local", "functional", EAGER, USERS, "ddp_compile-none", "ddp_compile-new", OURS]
    assert sorted(names, key=implementation_order) == [
        OURS, "ddp_compile-none", "ddp_compile-new", USERS, EAGER, "functional", "local",
    ]  # fmt: skip


def test_failures_are_told_apart_by_as_little_as_possible(tmp_path: Path) -> None:
    settings = [(link, cap) for link in ("none", "1gbit") for cap in CAPS]
    rows = [
        *(summary_row(link, OURS, "" if link == "none" else 1, bucket_cap_mb=cap) for link, cap in settings),
        *(summary_row(link, PEER, "" if cap == 25 else 1, bucket_cap_mb=cap) for link, cap in settings),
        *(
            summary_row(link, EAGER, "" if (link, cap) == ("none", 1) else 1, bucket_cap_mb=cap)
            for link, cap in settings
        ),
        *(summary_row(link, USERS, "", bucket_cap_mb=cap) for link, cap in settings),
        summary_row("none", "functional", 1),
    ]
    found = failures(read_run(write_summary(tmp_path, rows)).summary)
    assert found == [
        (OURS, ["not shaped"]),
        (USERS, []),
        (EAGER, ["not shaped 1 MiB"]),
        (PEER, ["25 MiB"]),
    ]


def test_cases_are_chosen_on_one_link_and_next_to_25_mib_where_no_step_was_measured() -> None:
    cases = [Case(PEER, "default", cap, link) for cap in (1.0, 20.0, 100.0) for link in ("none", "1gbit")]
    cases += [Case(OURS, mode, None, "1gbit") for mode in ("max-autotune", "default")]
    cases += [Case(EAGER, "default", 25.0, "100mbit")]
    assert choose_cases(cases, []) == [Case(OURS, "default", None, "1gbit"), Case(PEER, "default", 20.0, "1gbit")]
    assert choose_cases([], []) == []
