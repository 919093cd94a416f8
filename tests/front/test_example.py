"""The demonstration runs, learns, and shows less memory with `remat`, under every policy, at the same gradients."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("training step", "per-sample gradients", "Hessian-vector product")
WAYS = ("plain", "remat", "remat, save_matmuls", "remat, names")
NUMBER = r"(\d+\.\d+(?:e[+-]\d+)?)"


def run(*options: str, script: str = "char_lm.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"examples/{script}", "--quick", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other are slow on a busy machine
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def output() -> str:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    # torch 2.15 takes its own deprecated torch.jit.script for forward-mode derivatives.
    warned = [line for line in result.stderr.splitlines() if "Warning" in line and "`torch.jit.script`" not in line]
    assert not warned, result.stderr
    return result.stdout


def test_loss_falls(output: str) -> None:
    found = re.search(rf"^loss: {NUMBER} -> {NUMBER}$", output, re.MULTILINE)
    assert found, output
    first, last = map(float, found.groups())
    assert first > 4.5  # a guess among 128 characters is worth log(128) = 4.85
    assert last < 0.7 * first


def test_sample_norms_are_printed(output: str) -> None:
    found = re.search(rf"^gradient norms of 8 samples: {NUMBER} to {NUMBER}$", output, re.MULTILINE)
    assert found, output
    smallest, largest = map(float, found.groups())
    assert 0 < smallest < largest


def test_training_through_a_thousand_steps() -> None:
    """It compares gradients and peaks itself."""
    result = run(script="wave_equation.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"^gradients equal; loss {NUMBER} -> {NUMBER}$", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.parametrize("task", TASKS)
def test_table(output: str, task: str) -> None:
    """Of every task: less memory with `remat`, more where a policy keeps more, positive times, gradients that agree."""
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


def test_exit_status_tells_that_the_loss_did_not_fall() -> None:
    pytest.importorskip("tqdm", reason="needs the extra 'examples'")
    result = run("--steps", "1")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "The loss did not fall." in result.stderr


def test_a_loop_for_torch_trains_the_same_with_another_import() -> None:
    result = run(script="migrate_from_torch.py")
    assert result.returncode == 0, result.stdout + result.stderr
    changes = re.findall(r"^[-+](?![-+]).*$", result.stdout, re.MULTILINE)
    assert changes == ["-from torch.utils.checkpoint import (", "+from remat.compat import ("]
    assert "losses and parameters are the same" in result.stdout
    before, after = (float(peak) for peak, _ in re.findall(rf"^\S+ +{NUMBER} +{NUMBER}$", result.stdout, re.MULTILINE))
    assert 0 < after <= before


def test_fsdp2() -> None:
    """Two processes with gloo: the same losses, and less is kept."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, "examples/fsdp2.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "losses are the same" in result.stdout
    rows = re.findall(rf"^(plain|remat|remat, save_matmuls) +{NUMBER} +{NUMBER}$", result.stdout, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["plain", "remat", "remat, save_matmuls"]
    (plain, nothing, matmuls), (plain_peak, nothing_peak, _) = zip(*((float(a), float(b)) for _, a, b in rows))
    assert 0 < nothing < 0.3 * plain
    assert nothing < matmuls < plain
    assert nothing_peak < plain_peak


def test_fsdp2_says_how_to_start_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "examples/fsdp2.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 1
    assert "torchrun --nproc-per-node 2" in result.stderr
