"""The archives of a release: complete, and fit for an environment without the checkout."""

import os
import sys
import tarfile
import zipfile

import pytest

import fedntk

from .conftest import ROOT, output_of

UV = [sys.executable, "-m", "uv"]


@pytest.mark.slow
def test_wheel_and_source_archive_hold_what_a_stranger_needs(tmp_path):
    """The wheel is made from the source archive; the demo runs from it with pinned packages."""
    archives, folder = tmp_path / "dist", f"fedntk-{fedntk.__version__}"
    output_of(*UV, "build", "--quiet", "--out-dir", archives, ROOT)
    (source,), (wheel,) = archives.glob("*.tar.gz"), archives.glob("*.whl")
    output_of(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    with tarfile.open(source) as packed:
        names = {name.removeprefix(f"{folder}/") for name in packed.getnames()}
    files = set(output_of("git", "ls-files", cwd=ROOT).splitlines())
    assert files <= names
    assert not any(name.startswith((".venv", "build", "runs")) for name in names)
    with zipfile.ZipFile(wheel) as packed:
        modules = {name for name in packed.namelist() if ".dist-info/" not in name}
    rooms = ("ntk/", "trust/", "clients/", "strategies/", "simulations/")
    own = {"fedntk/__init__.py", "fedntk/py.typed"}
    assert modules == own | {f"fedntk/{name}" for name in files if name.startswith(rooms)}

    bin_folder = tmp_path / "venv" / "bin"
    output_of(*UV, "venv", "--python", sys.executable, bin_folder.parent)
    install = [*UV, "pip", "install", "--python", bin_folder / "python"]
    output_of(
        *install, "--constraint", ROOT / "constraints.txt", f"fedntk[simulation] @ file://{wheel}"
    )
    command, home = bin_folder / "fedntk", {**os.environ, "HOME": str(tmp_path)}
    home.pop("FLWR_HOME", None)
    assert output_of(command, "--version", env=home) == f"fedntk {fedntk.__version__}\n"
    said = output_of(command, "demo", "--out", tmp_path / "demo", env=home, cwd=tmp_path)
    assert "Test accuracy by communication round" in said
    assert (tmp_path / "demo" / "accuracy.png").stat().st_size > 10_000
    where = "import fedntk.simulations as s; print(s.__file__)"
    assert str(bin_folder.parent) in output_of(bin_folder / "python", "-c", where, cwd=tmp_path)
