"""Compiles the device, once for each state of its files and each version of torch. It takes a minute."""

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
BUILDS = HERE.parent.parent / ".build"


def why_not(name: str) -> str | None:
    """The reason why the simulated device is not available here, or None."""
    if not torch.__version__.startswith("2.13.") or torch.backends.cuda.is_built():
        return f"it needs the CPU build of torch 2.13, and this is {torch.__version__}"
    if _library(name).exists():
        return None
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "there is no C++ compiler (g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are missing (python3-dev)"
    return None


def build(name: str) -> ModuleType:
    """The extension, compiled if necessary."""
    library = _library(name)
    if not library.exists():
        from torch.utils.cpp_extension import load

        path = os.environ["PATH"]
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), path])  # where pip puts ninja
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            return load(library.stem, [HERE / "device.cpp"], extra_cflags=_flags(name), build_directory=library.parent)
        finally:
            os.environ["PATH"] = path
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flags(name: str) -> list[str]:
    cuda = name == "cuda"
    return ["-O1", "-g0", f"-DSIM_TYPE={'CUDA' if cuda else 'PrivateUse1'}", f"-DSIM_IS_CUDA={int(cuda)}"]


def _library(name: str) -> Path:
    """The path of the compiled library."""
    sources = [path.read_bytes() for path in sorted(HERE.glob("*.[ch]*"))]
    parts = [*sources, " ".join(_flags(name)).encode(), torch.__version__.encode(), sys.version.encode()]
    return BUILDS / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16] / f"simulated_{name}.so"
