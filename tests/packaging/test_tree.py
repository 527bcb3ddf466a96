"""What must hold of the source tree itself; quick, so part of `make test`."""

import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ROOTS = ("protos", "services", "scheduler", "workers")
# Split, so that this file does not hold what it looks for.
INDEX_HOSTS = tuple(".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org")))
BESIDE = "/".join(("..", "shared"))


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def packages() -> list[Path]:
    """The packages directly below each portion of the namespace."""
    return [
        path
        for root in IMPORT_ROOTS
        for path in sorted((ROOT / root / "laneway").iterdir())
        if path.is_dir() and path.name != "__pycache__"
    ]


def test_the_namespace_has_no_module_of_its_own():
    # A file here would hide the other portions: `import laneway` would find one folder instead of four.
    assert [str(path) for root in IMPORT_ROOTS for path in (ROOT / root / "laneway").glob("*.py*")] == []


def test_each_package_is_a_typed_package():
    assert packages()
    assert [str(path) for path in packages() if not (path / "__init__.py").is_file()] == []
    assert [str(path) for path in packages() if not (path / "py.typed").is_file()] == []


def test_each_folder_with_modules_is_a_package():
    folders = {module.parent for package in packages() for module in package.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_no_package_is_in_two_portions():
    names = [path.name for path in packages()]
    assert sorted(names) == sorted(set(names))


def test_no_tracked_file_names_this_machine_or_a_package_index():
    here = [str(ROOT), str(ROOT.parent / "shared"), *INDEX_HOSTS, BESIDE]
    if len(Path.home().parts) > 1:
        here.append(f"{Path.home()}/")
    found = [
        f"{path.relative_to(ROOT)}: {needle}"
        for path in tracked_files()
        for needle in here
        if needle.encode() in path.read_bytes()
    ]
    # CI alone knows where recorded data lies; it hands that on in the environment.
    assert [line for line in found if line != f".ci/run: {BESIDE}"] == []


def test_each_stub_belongs_to_a_proto_and_each_proto_has_its_stubs():
    folder = ROOT / "protos" / "laneway" / "v1"
    expected = set()
    for proto in folder.glob("*.proto"):
        expected |= {f"{proto.stem}_pb2.py", f"{proto.stem}_pb2.pyi"}
        if re.search(r"^service ", proto.read_text(), re.MULTILINE):
            expected |= {f"{proto.stem}_pb2_grpc.py", f"{proto.stem}_pb2_grpc.pyi"}
    assert {path.name for path in folder.glob("*_pb2*") if path.is_file()} == expected


def test_constraints_pin_every_direct_dependency_but_tensorrt_llm():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    direct = {name_of(line) for line in requirements}
    pinned = {
        name_of(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", line)
    }
    assert direct - pinned == {"tensorrt-llm"}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()
