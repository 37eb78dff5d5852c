"""``python -m ddp_compile explain`` says what training on real ranks would say, and what is wrong with its input."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import explained
import pytest
import torch.distributed as dist
from explained import CAP_MIB, train
from in_ci import only
from rank_pool import Ranks

from ddp_compile.__main__ import main
from ddp_compile.commands.explain import explain_function
from ddp_compile.report.explanation import Explanation

ROOT = Path(__file__).parents[2]
CASES = [(name, way) for name in ("layers", "tied", "broken") for way in ("forward", "backward")]


@pytest.mark.parametrize(("name", "way"), only([("broken", "backward")], CASES))
def test_explain_as_training(name: str, way: str, ranks: Ranks) -> None:
    trained, _ = map(Explanation.from_json, ranks(2).run(train, name, way, "aot_eager"))
    traced = explain_function(f"explained:{name}", 2, {"split": way, "bucket_cap_mb": CAP_MIB})
    assert traced.plan.digest == trained.plan.digest
    assert traced == replace(trained, settings=traced.settings)
    assert any(launch.is_early for launch in traced.launches)
    if (name, way) == ("broken", "backward"):
        assert "bucket 3 not launched early: another gradient came after it had been launched" in str(traced)
        assert "\nthe first graph break: " in str(traced) and " in no graph" in str(traced)


def test_unused_parameters_and_modules_of_a_sequence(ranks: Ranks) -> None:
    trained, _ = map(Explanation.from_json, ranks(2).run(train, "unused", "auto", "eager", find_unused_parameters=True))
    (bucket,) = [bucket.index for bucket in trained.plan.buckets if bucket.gradients[0].fqn.startswith("norm.")]
    for explanation in (trained, explain_function("explained:unused", 2, {"bucket_cap_mb": CAP_MIB})):
        assert f"bucket {bucket} not launched early: its parameters got no gradient" in str(explanation)
        assert explanation.in_no_graph == ()
        assert [part.module for part in explanation.graphs[0].partitions] == [None, "layers.1", "layers.2"]
        assert "\n  cut at layers.2 (" in str(explanation)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("explained:wrong_shape", ["the forward raised", "RuntimeError: ", "X [64, 64]", "torch.tanh(layer(x))"]),
        ("explained:no_inputs", ["the forward without inputs (to pass some", "TypeError: ", "missing 1 required"]),
        ("explained:raising", ["explained:raising() raised", "LookupError: there is no", "raise LookupError"]),
        ("explained:reads_values", ["fake tensors, which have no values", "if x.sum().item() > 0"]),
        ("explained:bad_loss", ["the loss raised", "AttributeError: ", "no_such_field"]),
        ("explained:with_group", ["leave it out", "--world-size ranks", 'dist.init_process_group("gloo")']),
        ("explained:train_itself", ["return the module as it is", "explained:train_itself returns a module"]),
        ("explained:lazy", ["nn.Linear(8, 4) instead of nn.LazyLinear(4)", "nn.Sequential(nn.LazyLinear"]),
        ("explained:a_number", ["returns an int; it must return a module, (module, inputs), (module, args, kwargs)"]),
        ("explained:missing", ["function 'explained:missing' cannot be imported"]),
        ("no_such_module:f", ["No module named 'no_such_module'"]),
        ("tests/explained.py:layers", ["has a path before the colon; pass tests.explained:layers, the module's name"]),
        ("explained.layers", ["function 'explained.layers' is not known; pass your own module:function"]),
    ],
)
def test_functions_that_fail(function: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", function]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("explain: ") and "Traceback" not in error and len(error.splitlines()) <= 3
    assert [text for text in says if text not in error] == []
    assert ("return the module as it is" in error) == (function == "explained:train_itself")
    assert not dist.is_initialized()


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in [
        (["--world-size", "0"], "--world-size 0 must be at least 1"),
        (["--json", str(tmp_path / "no" / "folder.json")], "no folder"),
        (["--html", "page.html"], "--html page.html is no longer an argument; pass --json"),
        (["--bucket-cap-mb", "-1"], "explain: bucket_cap_mb=-1.0 must be a positive and finite number"),
    ]:
        assert main(["explain", "explained:layers", *options]) == 2
        assert says in capsys.readouterr().err


def test_capacities_of_another_device(capsys: pytest.CaptureFixture[str]) -> None:
    cuda = ("--device", "cuda")
    for options, device, said in [((), "cpu", "1, then 5 MiB"), (cuda, "cuda", "1, then 64 MiB")]:
        assert main(["explain", "explained:layers", "--world-size", "512", *options]) == 0
        out = capsys.readouterr().out
        assert f"\nassumed capacities: {said}, the default for {device}; --device" in out
        assert ("; bucket_cap_mb=[1, 64]\n" in out) == (device == "cuda")
    assert main(["explain", "explained:layers", "--world-size", "512", *cuda, "--bucket-cap-mb", "25"]) == 0
    assert "bucket_cap_mb=[1, 25]\n" in capsys.readouterr().out


def test_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "explanation.json"
    options = ["--split", "forward", "--bucket-cap-mb", str(CAP_MIB), "--json", str(data)]
    assert main(["explain", "explained:layers", *options]) == 0
    document, out = json.loads(data.read_text()), capsys.readouterr().out
    assert "launched early: after the backward of a partition\n" in out
    assert "not launched early: all gradients are there only when the backward of the graph ends\n" in out
    assert (document["model"], document["launches"][0]["is_early"]) == ("Layers", True)


def test_help_and_wrong_words_import_no_torch() -> None:
    for words, status in [
        (["--help"], 0),
        (["explain", "--help"], 0),
        (["plan", "--help"], 0),
        (["bench", "--help"], 0),
        (["bench", "--rounds", "0"], 2),
        (["bench", "--link", "1gb"], 2),
        (["explian", "m:f"], 2),
    ]:
        code = f"import sys; sys.argv[1:] = {words}; import ddp_compile.__main__ as m\n"
        code += "try: m.main()\nfinally: print(sorted(sys.modules.keys() & {'torch', 'numpy'}))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (status, "[]"), result.stderr


def test_group_of_the_caller(single_rank_group: None) -> None:
    with pytest.raises(ValueError, match="there is a process group already"):
        explain_function("explained:layers", 2, {})


def test_parameters_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    explanation = explain_function("explained:large", 256, {})
    assert explanation.plan.num_bytes > 2**39 and explanation.world_size == 256
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert explain_function("explained:made_on_import", 2, {}).launches
    assert all(type(parameter).__name__ == "FakeTensor" for parameter in explained.REAL.parameters())
