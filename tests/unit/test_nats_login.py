"""Which servers are worked with."""

from __future__ import annotations

import pytest
from nats.aio.client import ServerVersion

from laneway.core.errors import ConfigError
from laneway.runtime.nats_login import check_version


@pytest.mark.parametrize("version", ["1.99.9", "2.14.9", "2.9.25"])
def test_a_server_that_is_too_old_is_refused_by_name(version: str):
    with pytest.raises(ConfigError, match=rf"nats-server .*{version}.* at nats.example:4222 is too old"):
        check_version(ServerVersion(version), "nats.example:4222")


@pytest.mark.parametrize("version", ["2.15.0", "2.15.1", "2.16.0", "3.0.0", "2.15.0-beta.1"])
def test_a_server_that_is_new_enough_is_taken(version: str):
    check_version(ServerVersion(version), "nats.example:4222")
