"""The examples and the notebook run; they show less memory with `remat` at the same gradients."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import ROOT

TOUR = ROOT / "docs/tutorials/tour.ipynb"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WAYS = ("plain", "remat", "remat, save_matmuls")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for jvp
NUMBER = r"(\d+\.\d+(?:e[+-]\d+)?)"
Run = Callable[..., str]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example in this process, which has imported torch already, and return its output.

    The current folder is a temporary one, as an example may write a file.
    """

    def run(script: str, *options: str) -> str:
        path = ROOT / "examples" / script
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *options])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def alone(*command: str) -> str:
    """Run an example in its own process, with one thread: threads that wait for each other are slow on a busy machine.

    It may print no warning but torch's own about its `torch.jit.script`, and no progress bar, as there is no terminal.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step/s" not in done.stderr
    assert not re.search(r"Warning(?!.*`torch.jit.script`)", done.stderr) or "torch.distributed.run" in command
    return done.stdout


def row(label: str, text: str) -> list[float]:
    """The numbers of a table's row."""
    found = re.search(rf"^{re.escape(label)} +((?:{NUMBER}|\d+| )+)$", text, re.MULTILINE)
    assert found, text
    return [float(number) for number in found.group(1).split()]


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers in the place of each `#` of a line."""
    found = re.search(f"^{pattern}$".replace("#", NUMBER), text, re.MULTILINE)
    assert found, text
    return [*map(float, found.groups())]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_can_be_copied(path: Path) -> None:
    """It imports nothing from the repository except `remat`. The character model may be longer."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (330 if path.name == "char_lm.py" else 100)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    optional = {"char_lm.py": "tqdm", "memory_timeline.py": "matplotlib", "finetune_huggingface.py": "transformers"}
    assert imported - sys.stdlib_module_names <= {"torch", "optree", "numpy", "remat", optional.get(path.name)}


def test_char_lm() -> None:
    """The loss falls. There is less memory with `remat`, more if a policy saves more, and equal gradients."""
    text = alone("examples/char_lm.py", "--quick")
    first, last = numbers("loss: # -> #", text)
    assert first > 4.5 and last < 0.7 * first  # the loss of a guess among 128 characters is log(128) = 4.85
    smallest, largest = numbers("gradient norms of 8 samples: # to #", text)
    assert 0 < smallest < largest
    for task in ("training step", "per-sample gradients", "Hessian-vector product"):
        (_, table) = re.split(rf"^{task} +memory, MiB +time, s +difference\n", text, flags=re.MULTILINE)
        rows = [row(f"  {way}", "\n".join(table.splitlines()[: len(WAYS)])) for way in WAYS]
        (plain, nothing, matmuls), _, differences = zip(*rows)
        assert max(differences) < 1e-5
        assert 0 < nothing < 0.7 * plain and nothing <= matmuls < plain


def test_memory_timeline(printed: Run, tmp_path: Path) -> None:
    text = printed("memory_timeline.py", "picture.png")
    plain, nothing, matmuls = (float(peak) for peak in re.findall(rf" peak +{NUMBER} MiB$", text, re.MULTILINE))
    assert nothing < 0.4 * plain and nothing < matmuls < 0.7 * plain
    assert text.count("Identical with and without remat") == 2
    assert (tmp_path / "picture.png").exists() != ("Install matplotlib" in text)


def test_train_transformer(printed: Run) -> None:
    text = printed("train_transformer.py")
    (first, first_after), (last, last_after) = row("first loss", text), row("last loss", text)
    assert first == first_after and last == last_after < 0.5 * first
    for label, share in (("saved for backward, MiB", 0.1), ("peak of a step, MiB", 0.4)):
        before, after = row(label, text)
        assert after < share * before
    assert "losses and trained parameters: the same to the last bit" in text


def test_per_sample_gradients(printed: Run) -> None:
    text = printed("per_sample_gradients.py")
    assert row("remat on each block", text)[0] < 0.4 * row("plain", text)[0]
    assert row("largest difference of a gradient:", text)[0] < 1e-6
    assert 0 < numbers("norm of the mean of the clipped gradients: #, at most 1.0.*", text)[0] <= 1


def test_hessian_vector_products(printed: Run) -> None:
    text = printed("hessian_vector_products.py")
    (plain, expected), (peak, eigenvalue) = row("plain", text), row("remat on each layer", text)
    assert peak < 0.3 * plain
    assert eigenvalue == pytest.approx(expected, rel=1e-5) and eigenvalue > 1
    assert row("largest difference of an estimate:", text)[0] < 1e-4


def test_maml(printed: Run) -> None:
    """Without remat, memory grows with the inner steps; with remat it hardly does."""
    text = printed("maml.py")
    plain, ours, differences = zip(*(row(f"{steps:>11}", text) for steps in (1, 2, 4, 8, 16)))
    assert plain[-1] > 8 * plain[0] and ours[-1] < 3 * ours[0] and ours[-1] < 0.2 * plain[-1]
    assert max(differences) < 1e-5
    before, after = numbers(".*meta-steps: # -> #", text)
    assert after < 0.5 * before


def test_choose_policy(printed: Run) -> None:
    """It takes the fastest policy that fits; a budget that is too small is an error."""
    text = printed("choose_policy.py")
    assert "Identical with and without remat" in text
    rows = re.findall(r"^(policy=None|save_.*?)  +.*?iB +([\d.]+) MiB .* x ([\d.]+)", text, re.MULTILINE)
    fitting = {label: float(time) for label, peak, time in rows if float(peak) <= 25}
    assert len(fitting) >= 3
    chosen = re.search(r"^within 25\.0 MiB: (.*)$", text, re.MULTILINE).group(1)
    assert fitting[chosen] == min(fitting.values())
    with pytest.raises(SystemExit, match=r"No policy keeps a training step within 1\.0 MiB\."):
        printed("choose_policy.py", "1")


@pytest.mark.integration
def test_finetune_huggingface(printed: Run) -> None:
    pytest.importorskip("transformers")
    text = printed("finetune_huggingface.py")
    (plain, plain_peak, loss), (nothing, peak, _), (matmuls, _, _) = (row(way, text) for way in WAYS)
    assert nothing < 0.1 * plain and nothing < matmuls < plain and peak < 0.5 * plain_peak and loss < 4
    assert 0.5 * plain_peak < row("remat, budget of 34 MiB", text)[1] <= 34
    assert "losses of 8 steps: the same to the last bit" in text


def test_wave_equation(printed: Run) -> None:
    text = printed("wave_equation.py", "--quick")
    (plain, _, _), (usual, _, _), (peak, states, _) = (row(w, text) for w in ("plain loop", "scan", "scan, 4 states"))
    assert peak < usual < 0.5 * plain and peak < 0.2 * plain and states < 20
    assert "gradients: the same to the last bit" in text
    losses = [float(loss) for loss in re.findall(rf"^iteration \d+: loss {NUMBER}$", text, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]


def test_migrate_from_torch(printed: Run) -> None:
    text = printed("migrate_from_torch.py")
    torchs, ours = re.findall(rf"^(\S+) +{NUMBER} +{NUMBER} +{NUMBER}  (.*)$", text, re.MULTILINE)
    assert (torchs[0], torchs[4]) == ("torch.utils.checkpoint", "raises an error")
    assert (ours[0], ours[4]) == ("remat.compat", "works")
    assert torchs[1:3] == ours[1:3] and 0 < float(ours[3]) <= float(torchs[3])
    assert "losses and trained parameters: the same to the last bit" in text


def test_fsdp2(printed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with gloo have the same losses, and save less."""
    text = alone("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/fsdp2.py")
    assert "losses are the same" in text
    (plain, plain_peak), (nothing, peak), (matmuls, _) = (row(way, text) for way in WAYS)
    assert 0 < nothing < 0.1 * plain and nothing < matmuls < 0.7 * plain and peak < 0.5 * plain_peak
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        printed("fsdp2.py")


def test_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change, store new outputs: `jupyter nbconvert --to notebook --execute --inplace`."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    pyplot.close("all")  # figures of other tests
    namespace: dict[str, Any] = {}
    printed = plots = 0
    for cell in json.loads(TOUR.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec("".join(cell["source"]), namespace)
        streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        assert {output["name"] for output in streams} <= {"stdout"}  # warnings would have paths of a machine
        expected = "".join("".join(output["text"]) for output in streams)
        out, stored = (re.sub(r"torch \d\S*,", "torch ...,", text) for text in (capsys.readouterr().out, expected))
        assert out == stored
        images = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        assert len(images) == len(pyplot.get_fignums())
        pyplot.close("all")
        printed, plots = printed + bool(expected), plots + len(images)
    assert printed >= 5 and plots == 2
