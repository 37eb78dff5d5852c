"""Plurals and articles in messages."""

import pytest

from ddp_compile.errors import number_of, with_article


@pytest.mark.parametrize(("count", "said"), [(0, "0 buckets"), (1, "1 bucket"), (2, "2 buckets")])
def test_one_has_no_plural(count: int, said: str) -> None:
    assert number_of(count, "bucket") == said


@pytest.mark.parametrize(
    "said", ["a Linear", "an OptimizedModule", "an FSDPModule", "an MLP", "a DDP", "a UNet", "an int", "a list", "a X"]
)
def test_the_article_is_the_one_that_is_spoken(said: str) -> None:
    assert with_article(said.split()[1]) == said
