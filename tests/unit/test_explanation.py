"""Explanations as data: JSON and back, what is wrong with JSON, and the text on a report's page."""

import json
from dataclasses import replace
from html import escape

import pytest
from plans import gradients, plan_in_frames
from simulated_steps import MIB, Simulation, six_buckets

from ddp_compile.report.explanation import (
    Break,
    BucketLaunch,
    Explanation,
    GraphExplanation,
    Partition,
    Refusal,
    Region,
    SourceLine,
)
from ddp_compile.report.page import render_page
from ddp_compile.report.step_report import StepReport

HOSTILE = "<script>alert('&amp;')</script>\""
LINE = SourceLine(f"/a b/{HOSTILE}.py", 7, f"x = y < z  # {HOSTILE}")


def explanation() -> Explanation:
    """Everything there is, each with a text that is markup unless it is escaped."""
    refusal = Refusal(HOSTILE, f"reason {HOSTILE}", 0, HOSTILE, LINE)
    parts = (Partition((1,), None, None, None), Partition((0, 1), HOSTILE, HOSTILE, LINE))
    return Explanation(
        model=HOSTILE,
        world_size=3,
        algorithm=HOSTILE,
        settings=(f"backend={HOSTILE!r}",),
        plan=plan_in_frames(gradients(10, 20, 30), [0, 1], cap_bytes=30),
        launches=(BucketLaunch(0, True, HOSTILE), BucketLaunch(1, False, "because"), BucketLaunch(2, True, HOSTILE)),
        graphs=(
            GraphExplanation(0, 2, parts, False, (), (refusal, replace(refusal, source=None, bucket=None))),
            GraphExplanation(1, 0, (Partition((), None, None, None),), True, (refusal,), ()),
        ),
        regions=(Region(HOSTILE, ("a", "b"), 1, 0),),
        in_no_graph=(2,),
        breaks=(Break("the first graph break", HOSTILE, LINE),),
        sharding=(HOSTILE,),
        averaging=(HOSTILE,),
    )


def test_json_and_back() -> None:
    text = explanation().to_json()
    assert Explanation.from_json(text) == explanation()
    assert json.loads(text)["digest"] == explanation().plan.digest
    assert str(Explanation.from_json(text)) == str(explanation())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 1}, "has JSON version 1, but this version of ddp_compile reads 3"),
        ({"launches": [{"bucket": 0, "is_early": True}]}, r"explanation.launches\[0\] lacks \['when'\]"),
        ({"plan": {}}, "bucket plan is malformed"),
    ],
)
def test_malformed_json(change: dict[str, object], says: str) -> None:
    document = json.loads(explanation().to_json()) | change
    with pytest.raises(ValueError, match=says):
        Explanation.from_json(json.dumps(document))
    with pytest.raises(ValueError, match="cannot be read"):
        Explanation.from_json("{")
    with pytest.raises(ValueError, match="JSON version None"):
        Explanation.from_json("[]")


def test_explanation_of_a_report() -> None:
    report = replace(six_buckets(), explanation=explanation())
    assert StepReport.from_json(report.to_json()) == report
    assert f"<pre>{escape(str(explanation()))}</pre>" in render_page(report)
    assert "<pre>" not in render_page(replace(report, explanation=None))


def test_advice_says_why_a_bucket_is_not_early() -> None:
    # Nothing of the third bucket is hidden, and the transfers before it are over.
    buckets = [(["a"], MIB), (["b"], MIB), (["c"], 9 * MIB), (["d"], MIB)]
    report = Simulation(buckets=buckets, ready=[0.01, 0.05, 0.09, 0.0901]).run()
    said = [each.text for each in report.advice() if each.bucket == 2]
    assert len(said) == 1 and "is not launched" not in said[0]
    launches = tuple(BucketLaunch(index, False, "a hook changes its gradients") for index in range(4))
    said = [
        a.text for a in replace(report, explanation=replace(explanation(), launches=launches)).advice() if a.bucket == 2
    ]
    assert "it is not launched while the backward computes: a hook changes its gradients" in said[0]
