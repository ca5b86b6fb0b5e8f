"""Install torch for this machine, and say first what comes: ``python tools/torch_for_here.py [REQUIREMENT]``.

On Linux the newest torch brings several gigabytes of CUDA, on a machine without a GPU too. Without one a version is
asked for that package indexes carry as a build for processors; REQUIREMENT (``torch==2.12.1``) asks for another.
Run by the interpreter of the environment that torch goes into; needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

#: What the project needs, and what is asked for where there is no GPU.
ANY, WITHOUT_GPU = "torch>=2.11", "torch==2.13.0"
#: Names that packages of a GPU's libraries begin with.
LIBRARIES = ("nvidia-", "cuda-", "triton", "pytorch-triton")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
CHOOSE = "another: make demo TORCH='torch==2.12.1', or any requirement that pip reads"


def gpu() -> str:
    """The evidence of a GPU, "" if there is none: its driver's program that lists one, or what a driver leaves."""
    for program, words in (("nvidia-smi", ["-L"]), ("rocm-smi", ["--showid"])):
        if shutil.which(program):
            done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
            if done.returncode == 0 and "GPU" in done.stdout:
                return f"{program} lists a GPU"
    left = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
    return next((f"{path} is there" for path in left if path.exists()), "")


def wanted(given: str, found: str) -> str:
    """The requirement: as `given`, else by whether a GPU was `found`. Only on Linux does a wheel bring CUDA."""
    return given or (ANY if found or sys.platform != "linux" else WITHOUT_GPU)


def comes(requirement: str) -> list[tuple[str, str]] | None:
    """(name, version) of what an installation would bring; None where pip cannot say."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "install", "--dry-run", "--quiet", "--quiet", "--report", str(report), requirement]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if done.returncode or not report.exists():
            return None
        listed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [(one["metadata"]["name"].lower(), one["metadata"]["version"]) for one in listed]


def said(coming: Iterable[tuple[str, str]], found: str) -> str:
    """Describe the packages that an installation would bring, in words."""
    coming = list(coming)
    torch = next((version for name, version in coming if name == "torch"), "")
    if not torch:
        return "torch is here already"
    libraries = sum(name.startswith(LIBRARIES) for name, _ in coming)
    if not libraries:
        return f"coming: torch {torch} and {len(coming) - 1} packages, none of CUDA: about 0.2 GB to download"
    use = "" if found else ", of no use here: this index has no build of it without"
    return (
        f"coming: torch {torch} and {len(coming) - 1} packages, {libraries} of them a GPU's libraries: gigabytes{use}"
    )


def main(words: list[str]) -> int:
    """Say what comes, and install it; pip's exit code."""
    found = gpu()
    requirement = wanted(words[0] if words else "", found)
    tell(f"torch: {found or 'no GPU found here'}; asking for {requirement}\n  {CHOOSE}")
    coming = comes(requirement)
    tell("  " + (said(coming, found) if coming is not None else "pip does not say what would come"))
    if coming is not None and not coming:
        return 0
    return subprocess.run([*PIP, "install", "--quiet", "--no-compile", requirement], check=False).returncode


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main([word for word in sys.argv[1:] if word]))
