"""The examples run and show less memory with `remat` at the same gradients; the character model learns."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TASKS = ("training step", "per-sample gradients", "Hessian-vector product")
WAYS = ("plain", "remat", "remat, save_matmuls", "remat, names")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for jvp
NUMBER = r"(\d+\.\d+(?:e[+-]\d+)?)"
# One thread: threads that wait for each other are slow on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


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


def row(label: str, text: str) -> list[float]:
    """The numbers of a table's row."""
    found = re.search(rf"^{re.escape(label)} +((?:{NUMBER}|\d+| )+)$", text, re.MULTILINE)
    assert found, text
    return [float(number) for number in found.group(1).split()]


@pytest.fixture(scope="module")
def output() -> str:
    command = [sys.executable, "examples/char_lm.py", "--quick"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    # torch 2.15 uses its own deprecated torch.jit.script for forward-mode derivatives.
    warned = [line for line in result.stderr.splitlines() if "Warning" in line and "`torch.jit.script`" not in line]
    assert not warned, result.stderr
    return result.stdout


def test_loss_falls(output: str) -> None:
    found = re.search(rf"^loss: {NUMBER} -> {NUMBER}$", output, re.MULTILINE)
    assert found, output
    first, last = map(float, found.groups())
    assert first > 4.5  # the loss of a guess among 128 characters is log(128) = 4.85
    assert last < 0.7 * first


def test_sample_norms_are_printed(output: str) -> None:
    found = re.search(rf"^gradient norms of 8 samples: {NUMBER} to {NUMBER}$", output, re.MULTILINE)
    assert found, output
    smallest, largest = map(float, found.groups())
    assert 0 < smallest < largest


@pytest.mark.parametrize("task", TASKS)
def test_table(output: str, task: str) -> None:
    """Less memory with `remat`, more if a policy saves more, positive times, and equal gradients."""
    found = re.search(rf"^{task} +memory, MiB +time, s +difference\n((?:  .*\n){{{len(WAYS)}}})", output, re.MULTILINE)
    assert found, output
    memory = {}
    for way, line in zip(WAYS, found.group(1).splitlines(), strict=True):
        row = re.fullmatch(rf"  {way} +{NUMBER} +{NUMBER} +{NUMBER}", line)
        assert row, line
        memory[way], seconds, difference = map(float, row.groups())
        assert seconds > 0
        assert difference < 1e-5
    plain, nothing, matmuls, names = memory.values()
    assert 0 < nothing < 0.7 * plain
    assert nothing <= names <= matmuls < plain


def test_exit_status_if_the_loss_did_not_fall(printed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="needs the extra 'examples'")
    with pytest.raises(SystemExit) as exit_:
        printed("char_lm.py", "--quick", "--steps", "1")
    assert exit_.value.code == 1
    assert "The loss did not fall." in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_can_be_copied(path: Path) -> None:
    """It imports nothing from the repository except `remat`. The character model may be longer."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (330 if path.name == "char_lm.py" else 100)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    optional = {
        "char_lm.py": {"tqdm"},
        "memory_timeline.py": {"matplotlib"},
        "finetune_huggingface.py": {"transformers"},
    }
    assert imported - sys.stdlib_module_names - optional.get(path.name, set()) <= {"torch", "optree", "numpy", "remat"}


def test_memory_timeline(printed: Run, tmp_path: Path) -> None:
    text = printed("memory_timeline.py", "picture.png")
    peaks = [float(peak) for peak in re.findall(rf" peak +{NUMBER} MiB$", text, re.MULTILINE)]
    plain, nothing, matmuls = peaks
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
    found = re.search(rf"norm of the mean of the clipped gradients: {NUMBER}, at most 1.0", text)
    assert found and 0 < float(found.group(1)) <= 1


def test_hessian_vector_products(printed: Run) -> None:
    text = printed("hessian_vector_products.py")
    (plain, expected), (peak, eigenvalue) = row("plain", text), row("remat on each layer", text)
    assert peak < 0.3 * plain
    assert eigenvalue == pytest.approx(expected, rel=1e-5) and eigenvalue > 1
    assert row("largest difference of an estimate:", text)[0] < 1e-4


def test_maml(printed: Run) -> None:
    """Without remat, memory grows with the inner steps; with remat it hardly does."""
    text = printed("maml.py")
    rows = [row(f"{steps:>11}", text) for steps in (1, 2, 4, 8, 16)]
    plain, ours, differences = zip(*rows)
    assert plain[-1] > 8 * plain[0] and ours[-1] < 3 * ours[0] and ours[-1] < 0.2 * plain[-1]
    assert max(differences) < 1e-5
    found = re.search(rf"meta-steps: {NUMBER} -> {NUMBER}$", text, re.MULTILINE)
    assert found and float(found.group(2)) < 0.5 * float(found.group(1))


def test_choose_policy(printed: Run) -> None:
    """A larger budget means less recomputation; a budget that is too small is an error."""
    recomputed = []
    for budget in ("9", "30"):
        text = printed("choose_policy.py", budget)
        assert "Identical with and without remat" in text
        found = re.search(r"^within [\d.]+ MiB: (.*)$", text, re.MULTILINE)
        assert found, text
        line = next(line for line in text.splitlines() if line.startswith(found.group(1) + "  "))
        cells = re.split(r"  +", line)
        assert float(cells[2].split()[0]) <= float(budget)
        recomputed.append(float(cells[3].split()[0]))
    assert recomputed[0] > recomputed[1] == 0
    with pytest.raises(SystemExit, match=r"No policy keeps a training step within 1\.0 MiB\."):
        printed("choose_policy.py", "1")


@pytest.mark.integration
def test_finetune_huggingface(printed: Run) -> None:
    pytest.importorskip("transformers")
    text = printed("finetune_huggingface.py")
    (plain, plain_peak, loss), (nothing, peak, _), (matmuls, _, _) = (row(way, text) for way in WAYS[:3])
    assert nothing < 0.1 * plain and nothing < matmuls < plain and peak < 0.5 * plain_peak and loss < 4
    assert "losses of 8 steps: the same to the last bit" in text


def test_wave_equation(printed: Run) -> None:
    text = printed("wave_equation.py", "--quick")
    (plain, _, _), (peak, states, _) = row("plain loop", text), row("remat.scan", text)
    assert peak < 0.2 * plain and states < 20
    assert "gradients: the same to the last bit" in text
    losses = [float(loss) for loss in re.findall(rf"^iteration \d+: loss {NUMBER}$", text, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]


def test_migrate_from_torch(printed: Run) -> None:
    text = printed("migrate_from_torch.py")
    found = re.findall(rf"^(\S+) +{NUMBER} +{NUMBER} +{NUMBER}  (.*)$", text, re.MULTILINE)
    torchs, ours = found
    assert (torchs[0], torchs[4]) == ("torch.utils.checkpoint", "raises an error")
    assert (ours[0], ours[4]) == ("remat.compat", "works")
    assert torchs[1:3] == ours[1:3] and 0 < float(ours[3]) <= float(torchs[3])
    assert "losses and trained parameters: the same to the last bit" in text


def test_fsdp2() -> None:
    """Two processes with gloo: the same losses, and less is saved."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "examples/fsdp2.py"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "losses are the same" in result.stdout
    (plain, plain_peak), (nothing, peak), (matmuls, _) = (row(way, result.stdout) for way in WAYS[:3])
    assert 0 < nothing < 0.1 * plain and nothing < matmuls < 0.7 * plain and peak < 0.5 * plain_peak


def test_fsdp2_without_torchrun(printed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        printed("fsdp2.py")
