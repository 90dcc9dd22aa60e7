# SPDX-License-Identifier: Apache-2.0
"""Makes an environment with the Python code of an engine, without the engine's kernels.

    python environment.py FOLDER ENGINE==VERSION

The engine's wheel comes from the package index and is unpacked without its shared libraries. What else it needs is
what the wheel itself says, except for the packages of LEFT_OUT, which hold GPU code and are gigabytes. The environment
stands on the one that runs this program: torch and pytest come from there. libmla is installed from the sources, with
its entry points. The folder `wheels` beside FOLDER keeps the engines' wheels.

What is up to date stays; a FOLDER that is not finished is made anew.
"""

from __future__ import annotations

import email.parser
import fnmatch
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

# GPU code, and what depends on another torch than the one that is here.
LEFT_OUT = (
    "cuda-*",
    "fastsafetensors",
    "flash-attn-*",
    "flashinfer-*",
    "humming-kernels",
    "instanttensor",
    "nvidia-*",
    "nvshmem4py-*",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "sgl-*",
    "sglang-kernel",
    "tilelang",
    "timm",
    "tokenspeed-mla",
    "torch",
    "torch-memory-saver",
    "torchaudio",
    "torchcodec",
    "torchvision",
)


class NotOnIndexError(Exception):
    """The package index has no such version; the message is the requirement."""


def pip(*arguments: str | Path, python: Path | None = None) -> None:
    chosen = () if python is None else ("--python", python)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *chosen, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    for line in done.stderr.splitlines():
        if line.startswith("ERROR: No matching distribution found for "):
            raise NotOnIndexError(line.rpartition(" for ")[2])
    raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")


def wheel_of(engine: str, version: str, wheels: Path) -> Path:
    """The engine's wheel, downloaded if need be."""
    pattern = f"{engine}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        try:
            pip("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", wheels, f"{engine}=={version}")
        except NotOnIndexError as error:
            python = sysconfig.get_python_version()
            raise SystemExit(f"environment.py: the package index has no {error} for Python {python}") from None
    return next(wheels.glob(pattern))


def unpack(wheel: Path, site: Path) -> None:
    """The wheel's files, but for shared libraries."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if ".so" not in Path(name).suffixes])


def requirements(engine: str, version: str, site: Path) -> list[Requirement]:
    """What the engine says that it needs, here and without extras."""
    metadata = (site / f"{engine}-{version}.dist-info" / "METADATA").read_text(encoding="utf-8")
    found = []
    for line in email.parser.HeaderParser().parsestr(metadata).get_all("Requires-Dist", []):
        needed = Requirement(line)
        name = canonicalize_name(needed.name)
        if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and not any(
            fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT
        ):
            needed.marker = None
            found.append(needed)
    return found


def install(needed: list[Requirement], folder: Path, python: Path) -> None:
    """Installs them. Where a mirror of the package index lags behind, the versions that it has."""
    constraints, listed = folder / "constraints.txt", folder / "requirements.txt"
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
    while True:
        listed.write_text("".join(f"{requirement}\n" for requirement in needed), encoding="utf-8")
        try:
            return pip("install", "--quiet", "--requirement", listed, "--constraint", constraints, python=python)
        except NotOnIndexError as error:
            wanted = Requirement(str(error))
            relaxed = [r for r in needed if canonicalize_name(r.name) == canonicalize_name(wanted.name) and r.specifier]
            if not relaxed:
                raise SystemExit(f"environment.py: the package index has no {error}") from None
            print(f"  the package index has no {relaxed[0]}: any version will do", flush=True)
            relaxed[0].specifier = type(relaxed[0].specifier)("")


def link_libmla(site: Path) -> None:
    """libmla's metadata as it is now, with its entry points, and the way to its sources."""
    for old in site.glob("libmla-*.dist-info"):
        shutil.rmtree(old)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as p; p(sys.argv[1])",
            site,
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (site / "libmla.pth").write_text(f"{ROOT / 'python'}\n", encoding="utf-8")


def make(folder: Path, engine: str, version: str) -> None:
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    sources = (Path(__file__), ROOT / "python" / "requirements.txt")
    stamp, made_from = folder / "stamp", hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != made_from:
        print(f"{engine} {version}: making {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        unpack(wheel_of(engine, version, folder.parent / "wheels"), site)
        install(requirements(engine, version, site), folder, folder / "bin" / "python")
        stamp.write_text(made_from, encoding="utf-8")
    link_libmla(site)


if __name__ == "__main__":
    if len(sys.argv) != 3 or "==" not in sys.argv[2]:
        raise SystemExit("usage: environment.py FOLDER ENGINE==VERSION")
    make(Path(sys.argv[1]).resolve(), *sys.argv[2].split("==", 1))
