"""What the options of a triton pool must name before anything is asked of a server."""

from __future__ import annotations

from typing import Any

import pytest

from laneway.core.errors import ConfigError
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.registry import make_engine
from tests.support.triton_kit import triton_pool


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": "", "served_model": "m"}, "host:port of a Triton server's gRPC"),
        ({"address": "http://h:1", "served_model": "m"}, "host:port of a Triton server's gRPC"),
        ({"address": "h:1"}, "served_model is empty"),
    ],
)
def test_options_that_name_no_model_are_refused(options: dict[str, Any], said: str):
    chosen = EngineOptions(**options)
    with pytest.raises(ConfigError, match=said):
        make_engine(triton_pool("echo_ids", chosen), chosen)
