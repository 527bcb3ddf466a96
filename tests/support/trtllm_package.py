"""Makes a package `tensorrt_llm` with the signatures of one version (tests/support/trtllm_api), in a folder of its own.

What its classes do is ours: tests/support/trtllm_fake.py. A process finds the package where the folder is in its
PYTHONPATH, beside the root of this repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FACTS = Path(__file__).with_name("trtllm_api")
VERSIONS = ("1.0", "1.2", "1.4")
METHOD = re.compile(r"(\w+)\.(\w+) -> (.+)")
PROPERTY = re.compile(r"(\w+)\.(\w+): (.+)")
PARAMETER = re.compile(r"  (\w+): (.+?)(?: = (.+))?")
BASES = {"LLM": "fake.Llm", "RequestOutput": "fake.Output", "CompletionOutput": "fake.Completion"}
POSITIONAL = {*BASES, "LoRARequest", "LoraConfig"}  # plain data classes; the others take names only
SPECULATION = ("DraftTargetDecodingConfig", "EagleDecodingConfig", "MTPDecodingConfig", "NGramDecodingConfig")


@dataclass
class Parameter:
    name: str
    annotation: str
    default: str | None  # as in Python's source; None: there is none


@dataclass
class Method:
    returns: str
    parameters: list[Parameter] = field(default_factory=list)


@dataclass
class Facts:
    version: str = ""
    explicit: tuple[str, ...] = ()  # parameters in the signature of LLM() itself
    methods: dict[str, dict[str, Method]] = field(default_factory=dict)  # class: name: method
    properties: dict[str, dict[str, str]] = field(default_factory=dict)  # class: name: annotation


def facts_of(version: str) -> Facts:
    facts = Facts()
    for name in ("shared", version):
        for line in (FACTS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            _read(facts, line)
    return facts


def _read(facts: Facts, line: str) -> None:
    if line.startswith("version = "):
        facts.version = line.removeprefix("version = ")
    elif line.startswith("explicit = "):
        facts.explicit = tuple(line.removeprefix("explicit = ").split(", "))
    elif found := PARAMETER.fullmatch(line):
        last = list(facts.methods.values())[-1]
        list(last.values())[-1].parameters.append(Parameter(*found.groups()))
    elif found := METHOD.fullmatch(line):
        owner, name, returns = found.groups()
        facts.methods[owner] = {**facts.methods.pop(owner, {}), name: Method(returns)}  # the last one is read on
    elif found := PROPERTY.fullmatch(line):
        owner, name, annotation = found.groups()
        facts.properties.setdefault(owner, {})[name] = annotation
    else:
        assert not line or line.startswith("#"), line


def write_package(folder: Path, version: str) -> str:
    """Returns what PYTHONPATH has to have in front."""
    facts = facts_of(version)
    package = folder / "tensorrt_llm"
    (package / "llmapi").mkdir(parents=True)
    (package / "_classes.py").write_text("\n".join(_source(version, facts)) + "\n", encoding="utf-8")
    (package / "__init__.py").write_text(
        f'from tensorrt_llm._classes import LLM, SamplingParams\n\n__version__ = "{facts.version}"\n', encoding="utf-8"
    )
    (package / "llmapi" / "__init__.py").write_text("from tensorrt_llm._classes import *\n", encoding="utf-8")
    (package / "executor").mkdir()
    (package / "executor" / "__init__.py").touch()
    (package / "executor" / "request.py").write_text(
        "from tensorrt_llm._classes import LoRARequest\n", encoding="utf-8"
    )
    (package / "llmapi" / "llm_args.py").write_text("from tensorrt_llm._classes import *\n", encoding="utf-8")
    return f"{folder}:{FACTS.parents[2]}"


@contextmanager
def importable(folder: Path, version: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process, and forgotten afterwards."""
    write_package(folder, version)
    patch.syspath_prepend(str(folder))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def _source(version: str, facts: Facts) -> Iterator[str]:
    yield "from tests.support import trtllm_fake as fake"
    yield "from tests.support.trtllm_fake import CapacitySchedulerPolicy, RequestError"
    if version == "1.4":
        yield "from tests.support.trtllm_fake import PriorityPolicy as WaitingQueuePolicy"
    elif version == "1.2":
        yield "from tests.support.trtllm_fake import FcfsPolicy as WaitingQueuePolicy"
    for owner, methods in facts.methods.items():
        yield f"\n\nclass {owner}({BASES.get(owner, 'fake.Values')}):"
        if owner == "LLM":
            yield f"    BEHAVIOUR = fake.BEHAVIOURS[{version!r}]"
            yield f"    ARGUMENTS = {tuple(p.name for p in methods['__init__'].parameters)!r}"
        for name, method in methods.items():
            yield from _method(owner, name, method, facts.explicit)
        for name, annotation in facts.properties.get(owner, {}).items():
            yield f"\n    @property\n    def {name}(self) -> {annotation!r}:\n        return self.get({name!r})"
    for name in SPECULATION if "DecodingBaseConfig" in facts.methods else ():
        yield f"\n\nclass {name}(DecodingBaseConfig):\n    pass"
    yield "\n\nLLM.OUTPUT, LLM.COMPLETION = RequestOutput, CompletionOutput"


def _method(owner: str, name: str, method: Method, explicit: tuple[str, ...]) -> Iterator[str]:
    parameters = method.parameters
    if owner == "LLM" and name == "__init__":
        parameters = [p for p in parameters if p.name in explicit]
    signature = ["self", *(["*"] if owner not in POSITIONAL and name == "__init__" else [])]
    signature += [f"{p.name}: {p.annotation!r}" + (f" = {p.default}" if p.default else "") for p in parameters]
    given = ", ".join(f"{p.name}={p.name}" for p in parameters)
    if owner == "LLM" and name == "__init__":
        signature.append("**kwargs: 'Any'")
        given += ", **kwargs"
    yield f"\n    def {name}({', '.join(signature)}) -> {method.returns!r}:"
    yield f"        return self.do_{name.strip('_')}({given})"
