import pytest

from laneway.runtime.bus import Bus
from tests.support.nats import provision_region, small_catalogue

pytestmark = pytest.mark.wire


async def test_a_second_run_changes_nothing(bus: Bus):
    first = await provision_region(bus, small_catalogue())
    second = await provision_region(bus, small_catalogue())
    assert len(first) == 15
    assert second == []
