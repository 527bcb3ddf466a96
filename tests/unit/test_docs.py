"""What the pages name exists: settings, limits with their values, metrics, sections that links lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laneway.runtime.metrics import UNITS
from laneway.runtime.settings import ModelSettings, Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECTIONS = {name: getattr(Settings(), name) for name in Settings.__struct_fields__ if name != "models"}
SECTIONS["models"] = ModelSettings(name="chat")
NAMED = re.compile(rf"`({'|'.join(SECTIONS)})\.([a-z][a-z_<>]*(?:\.[a-z_]+)*)")
METRIC = re.compile(rf"laneway_[a-z0-9_]+_(?:{'|'.join(UNITS)})\b")


def setting(section: str, key: str) -> object:
    """The default of a setting; AttributeError if there is none."""
    found: object = SECTIONS[section]
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path):
    unknown = []
    for section, key in NAMED.findall(page.read_text(encoding="utf-8")):
        if key == "conf" or (ROOT / "scheduler" / "laneway" / section / f"{key}.py").exists():
            continue  # `nats.conf` is a file, `policy.admit` a module
        for lane in ("priority", "deferrable", "batch") if "<lane>" in key else ("",):
            try:
                setting(section, key.replace("<lane>", lane))
            except AttributeError:
                unknown.append(f"{section}.{key}")
    assert unknown == []


def metrics() -> set[str]:
    """The names under which Prometheus has our metrics."""
    found = set()
    for root in ("services", "scheduler", "workers"):
        for module in (ROOT / root / "laneway").rglob("*.py"):
            for kind, name in re.findall(r'(\w+)?\(\s*"(laneway_[a-z0-9_]+)"', module.read_text(encoding="utf-8")):
                if METRIC.fullmatch(name):
                    counts = kind == "counter" and not name.endswith("_total")
                    found.add(f"{name}_total" if counts else name)
    return found


def test_the_page_has_every_metric_and_no_other():
    known = metrics()
    assert len(known) > 20
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"laneway_[a-z0-9_]+[a-z0-9]", OPERATIONS)
    }
    assert named == known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_a_page_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) - headings == set()
