"""Limits of a door from the settings: the one place that knows both names."""

from __future__ import annotations

from laneway.admission.door import DoorLimits
from laneway.admission.holding import HoldLimits
from laneway.admission.streams import StreamLimits
from laneway.core.lanes import Lane
from laneway.runtime.settings import AdmissionSettings


def door_limits(admission: AdmissionSettings) -> DoorLimits:
    stream = StreamLimits(admission.stream_buffer_bytes, admission.delivered_ids_max)
    holds = {
        Lane.PRIORITY: admission.coalesce_priority_s,
        Lane.DEFERRABLE: admission.coalesce_deferrable_s,
        Lane.BATCH: admission.coalesce_batch_s,
    }
    return DoorLimits(
        admission.beat_s, admission.silence_s, stream, HoldLimits(holds, admission.coalesce_priority_streams)
    )
