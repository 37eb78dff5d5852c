"""What ``model.measure()`` returns: measured steps of all ranks, as text, as files and with advice."""

import importlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from ddp_compile.errors import number_of, this_rank, with_article
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.plan.typed_json import from_document
from ddp_compile.report.advice import Advice, advise
from ddp_compile.report.explanation import Explanation
from ddp_compile.report.steps import LEAST_SHARE, MeasuredSteps, Step, format_ms
from ddp_compile.report.timing import median_totals

_MOST_ROWS = 20


class StepReport(MeasuredSteps):
    """Some steps of all ranks, the same on every rank. For its fields, see `MeasuredSteps`."""

    def to_json(self) -> str:
        """As text, for `from_json`."""
        document = asdict(replace(self, plan=BucketPlan(()), explanation=None))
        explanation = None if self.explanation is None else json.loads(self.explanation.to_json())
        return json.dumps({**document, "plan": json.loads(self.plan.to_json()), "explanation": explanation})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report of a text that `to_json` has returned.

        Raises:
            ValueError: It is another text, or was written by another version. The error says what is wrong.
        """
        try:
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ValueError(f"it is {with_article(type(document).__name__)}")
            plan, explanation = (document.pop(name, None) for name in ("plan", "explanation"))
            known = {
                "plan": BucketPlan.from_json(json.dumps(plan)),
                "explanation": explanation and Explanation.from_json(json.dumps(explanation)),
            }
            return from_document(cls, document, "report", known)
        except ValueError as error:
            raise ValueError(f"not the JSON of a StepReport: {error}; pass what to_json() returned") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file in the format of its suffix; replaces a file that is there.

        Args:
            path: ``.html`` is one page that needs nothing else, ``.perfetto-trace`` is for ui.perfetto.dev, ``.json``
                for `from_json`. The folder has to exist.

        Raises:
            ValueError: The suffix is another one.
            FileNotFoundError: There is no such folder.
            ImportError: The format needs perfetto, which is not installed.
        """
        path = Path(path)
        cannot = f"{this_rank()}: cannot save a report to {str(path)!r}"
        if path.suffix not in (*_WRITERS, ".json"):
            raise ValueError(
                f"{cannot}: its suffix is {path.suffix!r}; end it with one of {', '.join([*_WRITERS, '.json'])}"
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{cannot}: there is no folder {str(path.parent)!r}; create it first")
        if path.suffix == ".json":
            path.write_text(self.to_json(), encoding="utf-8")
            return
        try:
            writer = importlib.import_module(_WRITERS[path.suffix])
        except ImportError as error:
            raise ImportError(
                f"{cannot}: {path.suffix} needs a package that cannot be imported ({error}); pip install perfetto, or"
                " save it as .html or .json"
            ) from error
        writer.write(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Raise a ValueError: reports are no longer drawn as PNG files."""
        raise ValueError(
            f"{this_rank()}: plot({os.fspath(path)!r}) is no longer there, since the page has the same timeline; call"
            ' save("step.html"), or save("step.perfetto-trace") for ui.perfetto.dev'
        )

    def advice(self) -> tuple[Advice, ...]:
        """What to act on in these steps, the costliest first; nothing from fewer than five steps."""
        return advise(self)

    def __str__(self) -> str:
        """A table of the last 20 steps at most, with the medians of all steps, in ms."""
        heading = (
            f"{self.model}, {self.algorithm}: {number_of(len(self.steps), 'step')} of"
            f" {number_of(len(self.steps[0].ranks), 'rank')}, {number_of(len(self.buckets), 'bucket')}, plan"
            f" {self.plan.digest}; times in ms, clocks within {self.clock_error_s * 1e3:.3f} ms"
        )
        medians = median_totals(self.steps)
        rows = [["step", *medians, "most in", "late"], *map(_row, self.steps[-_MOST_ROWS:])]
        rows.append(["median", *(format_ms(time, "") for time in medians.values()), "", ""])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        return "\n".join([heading, *table, *filter(None, [self.unknown_ends])])


#: Each has ``write(steps, path)``. Imported when needed, since perfetto need not be installed.
_WRITERS = {".html": "ddp_compile.report.page", ".perfetto-trace": "ddp_compile.report.trace"}


def _row(step: Step) -> list[str]:
    rank, late_s = step.latest
    bucket = step.most_exposed_bucket
    return [
        str(step.number),
        *(format_ms(time, "") for time in step.totals.values()),
        "" if bucket is None else f"bucket {bucket}",
        f"{format_ms(late_s, '')} (rank {rank})" if late_s >= LEAST_SHARE * step.duration_s else "",
    ]
