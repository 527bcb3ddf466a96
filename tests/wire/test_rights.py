"""What each role must not do on NATS, tried with its own key on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from laneway.core import subjects
from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.runtime.bus import Bus, NotPermitted
from laneway.runtime.lanes import LaneStore
from laneway.runtime.nats_users import new_seed
from laneway.runtime.provision import ProvisionError
from laneway.runtime.puller import LanePuller
from laneway.runtime.records import RecordStore
from laneway.runtime.rights import inbox_prefix
from tests.support.lanes import pulled
from tests.support.nats import (
    POOL,
    REGION,
    TENANT,
    eventually,
    make_job,
    make_record,
    nats_settings,
    provision_region,
    small_catalogue,
)
from tests.support.rights import USERS, Guarded, guarded_region

pytestmark = pytest.mark.wire

READY = f"lane.{REGION}.batch.{POOL}.any.{TENANT}.j"
PARK = f"park.{REGION}.batch.{POOL}.{TENANT}.0.1.1.g.j"
RECORD = f"job.{REGION}.{TENANT}.j"
LETTER = f"dead.{REGION}.batch.POISON.j"
CHECKPOINT = f"ckpt.{REGION}.j.1.0"
CHECKPOINTS = [CHECKPOINT, "$JS.API.STREAM.PURGE.CKPT_local", "$JS.API.DIRECT.GET.CKPT_local.>"]
STREAMS = (
    "JOBS_local",
    "PRIORITY_local",
    "BATCH_local",
    "INGEST_local",
    "VERDICTS_local",
    "DEAD_local",
    "KV_PLAN_local",
)
# Making, changing and removing streams and consumers.
PROVISIONING = [
    *(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "DELETE") for stream in STREAMS),
    *(f"$JS.API.STREAM.{verb}.BATCH_local" for verb in ("SNAPSHOT", "RESTORE", "MSG.DELETE", "LEADER.STEPDOWN")),
    *(f"$JS.API.CONSUMER.{verb}.BATCH_local" for verb in ("CREATE", "DURABLE.CREATE")),
    "$JS.API.CONSUMER.DELETE.BATCH_local.batch_chat-small_any",
    "$JS.API.CONSUMER.PAUSE.BATCH_local.batch_chat-small_any",
]
PURGES = [f"$JS.API.STREAM.PURGE.{stream}" for stream in STREAMS]
KEYS = ["$KV.WORKERS_local.w", "$KV.LEADER_local.leader", *(f"$KV.PLAN_local.{key}" for key in ("plan", "paused"))]
DRAINING = "$KV.PLAN_local.draining"
QUOTA = "$KV.PLAN_local.quota.a-provider"

FORBIDDEN = {
    "worker": [
        *PROVISIONING, *PURGES, *KEYS[1:], DRAINING, READY, f"park.{REGION}.priority.{POOL}.{TENANT}.0.1.1.g.j",
        PARK.replace(REGION, "another", 1), f"verdict.{REGION}.{TENANT}.j",
        f"ingest.{REGION}.batch.{TENANT}", "ctl.another-worker", "ctl.routing.local", "digest.local",
        "$JS.API.CONSUMER.CREATE.JOBS_local", "$JS.API.CONSUMER.MSG.NEXT.INGEST_local.admission",
        "$JS.ACK.INGEST_local.admission.1.1.1.1.0", "$JS.API.STREAM.MSG.GET.BATCH_local",
        "$JS.API.DIRECT.GET.VERDICTS_local.>", "job.another.t.j",
        "dead.another.batch.POISON.j", "$JS.API.STREAM.MSG.GET.DEAD_local",
        "ckpt.another.j.1.0", "$JS.API.STREAM.UPDATE.CKPT_local", "$JS.API.STREAM.DELETE.CKPT_local",
    ],
    "admission": [
        *PROVISIONING, *KEYS, DRAINING, QUOTA, LETTER, *CHECKPOINTS,
        "$JS.API.STREAM.PURGE.JOBS_local", "$JS.API.STREAM.PURGE.VERDICTS_local",
        "$JS.API.CONSUMER.CREATE.JOBS_local",
        "$JS.API.CONSUMER.MSG.NEXT.BATCH_local.batch_chat-small_any",
        "$JS.ACK.BATCH_local.batch_chat-small_any.1.1.1.1.0", "tok.door", "digest.local", "ctl.routing.local",
        f"ingest.{REGION}.batch.{TENANT}", "job.another.t.j",
    ],
    "scheduler": [
        *PROVISIONING, KEYS[0], DRAINING, QUOTA, LETTER, *CHECKPOINTS,
        "$JS.API.STREAM.PURGE.JOBS_local", "tok.door", "digest.local",
        "$JS.API.CONSUMER.MSG.NEXT.BATCH_local.batch_chat-small_any", f"verdict.{REGION}.{TENANT}.j",
        f"ingest.{REGION}.batch.{TENANT}", "ctl.routing.local",
    ],
    "routing": [
        *PROVISIONING, *PURGES, *KEYS, QUOTA, LETTER, *CHECKPOINTS, READY, PARK, RECORD,
        f"verdict.{REGION}.{TENANT}.j", "tok.door",
        f"ev.{REGION}.j", "ctl.worker", "digest.another", "$JS.API.DIRECT.GET.JOBS_local.>",
    ],
    "operator": [
        *PURGES, *KEYS, DRAINING, QUOTA, LETTER, *CHECKPOINTS, READY, PARK, RECORD,
        f"verdict.{REGION}.{TENANT}.j", "tok.door", "ctl.worker",
        "$JS.API.STREAM.MSG.GET.BATCH_local", "$JS.API.DIRECT.GET.PRIORITY_local.>",
        "$JS.API.STREAM.MSG.GET.INGEST_local",
        "$JS.API.STREAM.DELETE.JOBS_local", "$JS.API.CONSUMER.DELETE.BATCH_local.batch_chat-small_any",
    ],
    "producer-acme": [
        *PROVISIONING, *PURGES, *KEYS, DRAINING, QUOTA, LETTER, *CHECKPOINTS, READY, PARK, RECORD,
        f"verdict.{REGION}.acme.j", "tok.door",
        f"ingest.{REGION}.batch.other", f"ev.{REGION}.j", "$JS.API.INFO", "$JS.API.STREAM.INFO.JOBS_local",
        "$JS.API.DIRECT.GET.JOBS_local.job.local.other.*", "$JS.API.DIRECT.GET.VERDICTS_local.verdict.local.other.*",
        "$JS.API.DIRECT.GET.VERDICTS_local", "$JS.API.STREAM.MSG.GET.VERDICTS_local",
        "$JS.API.CONSUMER.CREATE.VERDICTS_local", "$JS.API.CONSUMER.CREATE.VERDICTS_local.c.verdict.local.other.*",
        "$JS.API.CONSUMER.MSG.NEXT.INGEST_local.admission",
    ],
}  # fmt: skip
DEAF = {
    "worker": ["tok.*", "ev.local.*", "job.local.*.*", "verdict.local.*.*", "ingest.>", "lane.>", "ctl.routing.local"],
    "admission": ["$KV.PLAN_local.quota.*", "ctl.*", "job.local.*.*", "lane.>", "bell.>", "verdict.>", "ingest.>"],
    "scheduler": ["tok.*", "ctl.*", "ev.local.*", "job.local.*.*", "lane.>", "park.>", "ingest.>"],
    "routing": [
        "tok.*",
        "ev.local.*",
        "job.local.*.*",
        "ctl.*",
        "ctl.routing.another",
        "bell.>",
        "$KV.WORKERS_local.*",
    ],
    "operator": ["tok.*", "ctl.*", "lane.>", "ingest.>"],
    "producer-acme": ["verdict.local.other.*", "verdict.local.*.*", "verdict.>", "job.local.other.*", "job.>", "ev.>"],
}
EVERYTHING = [">", "*", "$JS.API.>", "$JS.ACK.>", "$SYS.>", "_INBOX.>", "$KV.>"]


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_region(tmp_path) as made:
        yield made


async def may_publish(bus: Bus, subject: str) -> bool:
    try:
        await bus.store(subject, b"", timeout_s=0.2)
    except NotPermitted:
        return False
    except Exception:  # noqa: BLE001 - whatever else: the server took it
        return True
    return True


async def may_listen(bus: Bus, subject: str) -> bool:
    try:
        await bus.unsubscribe(await bus.listen(subject, lambda msg: None))
    except NotPermitted:
        return False
    return True


ALLOWED = {
    "worker": [
        RECORD,
        PARK,
        LETTER,
        *CHECKPOINTS,
        "tok.door",
        f"ev.{REGION}.j",
        KEYS[0],
        "$JS.ACK.BATCH_local.c.1.1.1.1.0",
    ],
    "admission": [
        RECORD,
        READY,
        PARK,
        f"verdict.{REGION}.{TENANT}.j",
        "ctl.worker",
        "$JS.API.STREAM.MSG.GET.DEAD_local",
        "$JS.API.STREAM.PURGE.DEAD_local",
        "$JS.ACK._.A.INGEST_local.c.1.1.1.1.0.r",
    ],
    "scheduler": [RECORD, READY, PARK, *KEYS[1:], "ctl.worker", "$JS.FC.JOBS_local.c.1"],
    "routing": [DRAINING, "digest.local", "ctl.routing.another"],
    "operator": ["$JS.API.STREAM.UPDATE.JOBS_local", "$JS.API.CONSUMER.CREATE.BATCH_local.c.lane.local.batch.p.any.>"],
    "producer-acme": [f"ingest.{REGION}.{lane}.acme" for lane in LANES],
}


@pytest.mark.parametrize("user", FORBIDDEN)
async def test_what_is_not_a_roles_business_is_refused(region: Guarded, user: str):
    async with region.bus(user) as bus:
        published = [subject for subject in FORBIDDEN[user] if await may_publish(bus, subject)]
        heard = [subject for subject in (*DEAF[user], *EVERYTHING) if await may_listen(bus, subject)]
        assert (published, heard) == ([], [])
        assert [subject for subject in ALLOWED[user] if not await may_publish(bus, subject)] == []


async def test_nobody_reads_or_writes_anothers_inbox(region: Guarded):
    wrong = []
    for user in USERS:
        async with region.bus(user) as bus:
            for owner in USERS:
                inbox = f"{inbox_prefix(owner)}.any"
                for may, act in ((may_listen, "listens to"), (may_publish, "writes to")):
                    if owner != user and await may(bus, inbox):
                        wrong.append(f"{user} {act} the inbox of {owner}")
            assert await may_listen(bus, f"{inbox_prefix(user)}.>"), f"{user} hears its own answers"
    assert wrong == []


async def test_a_scheduler_sees_that_the_region_is_as_it_should_be_and_cannot_change_it(region: Guarded):
    async with region.bus("scheduler") as scheduler:
        assert await provision_region(scheduler, small_catalogue()) == []
        with pytest.raises(ProvisionError, match=r"INGEST_local.*laneway provision.*stream\.update\.ingest_local"):
            await provision_region(scheduler, small_catalogue(), ingest_bytes_max=128 * 1024**2)
        with pytest.raises(ProvisionError, match="PRIORITY_local"):
            await provision_region(scheduler, small_catalogue(pools=(POOL, "another")))


async def test_a_worker_that_means_harm_changes_nothing_in_the_lanes(region: Guarded):
    record = make_record(lane=Lane.BATCH)
    async with region.bus("admission") as door, region.bus("worker") as worker:
        await LaneStore(door, REGION).put_ready(make_job(record), await RecordStore(door).create(record))
        with pytest.raises(NotPermitted, match=r"stream\.purge\.batch_local.*nkey_file"):
            await LaneStore(worker, REGION).purge(record)
        with pytest.raises(NotPermitted, match=r"publish to lane\.local"):
            await LaneStore(worker, REGION).put_ready(make_job(make_record()), 1)
        async with LanePuller(worker, REGION, Lane.BATCH, POOL) as puller:
            (delivery,) = await pulled(puller, 1)
            assert delivery.job.record.job_id == record.job_id
            await delivery.ack()
        async with region.bus("scheduler") as scheduler:
            lanes = LaneStore(scheduler, REGION)
            await eventually(lambda: _empty(lanes))


async def _empty(lanes: LaneStore) -> bool:
    depth = await lanes.depths(Lane.BATCH, POOL)
    return (depth.ready, depth.running) == (0, 0)


@pytest.mark.parametrize("forged", [{}, {4: "BATCH_local"}, {3: "x", 4: "BATCH_local"}, {2: "_", 4: "BATCH_local"}])
async def test_a_worker_cannot_acknowledge_what_a_producer_sent(region: Guarded, forged: dict[int, str]):
    """A received job would be lost. The server reads the numbers of an acknowledgement, whatever stands before them."""
    async with region.bus("producer") as producer, region.bus("admission") as door, region.bus("worker") as worker:
        await producer.store(subjects.ingest(REGION, Lane.BATCH, "default"), b"")
        delivered: list[str] = []
        inbox = door.nc.new_inbox()
        await door.listen(inbox, lambda msg: delivered.append(msg.reply))
        door.nc.post("$JS.API.CONSUMER.MSG.NEXT.INGEST_local.admission", b'{"batch":1}', inbox)
        await eventually(lambda: delivered)
        tokens = delivered[0].split(".")
        for place, token in forged.items():
            tokens[place] = token
        await worker.emit(".".join(tokens), b"+ACK")
        await worker.flush()
        await door.flush()
    async with region.bus("operator") as operator:
        info = await operator.api("CONSUMER.INFO.INGEST_local.admission", {})
        assert (info["num_ack_pending"], info["num_pending"]) == (1, 0)


async def test_acknowledgements_of_the_servers_next_version_are_within_the_rights(tmp_path: Path):
    record = make_record(lane=Lane.BATCH)
    async with (
        guarded_region(tmp_path, extra_config="feature_flags { js_ack_fc_v2: true }\n") as region,
        region.bus("admission") as door,
        region.bus("worker") as worker,
        region.bus("scheduler") as scheduler,
    ):
        sequence = await RecordStore(door).create(record)
        await LaneStore(door, REGION).put_ready(make_job(record), sequence)
        async with LanePuller(worker, REGION, Lane.BATCH, POOL) as puller:
            (delivery,) = await pulled(puller, 1)
            await delivery.ack()
        lanes = LaneStore(scheduler, REGION)
        await eventually(lambda: _empty(lanes))
        async with RecordStore(scheduler).follow_heads(REGION) as heads:
            assert (await anext(heads)).job_id == record.job_id


async def test_a_producer_reads_its_own_verdicts_and_records_and_publishes_for_nobody_else(region: Guarded):
    async with region.bus("admission") as door, region.bus("producer-acme") as acme:
        heard: list[str] = []
        await acme.listen("verdict.local.acme.*", lambda msg: heard.append(msg.subject))
        for tenant in ("acme", "other"):
            await door.store(subjects.verdict(REGION, tenant, "j"), b"verdict")
            await RecordStore(door).create(make_record(f"{REGION}-{tenant}", tenant=tenant))
        await eventually(lambda: heard == ["verdict.local.acme.j"])
        assert (await RecordStore(acme).get(REGION, "acme", f"{REGION}-acme")) is not None
        with pytest.raises(NotPermitted):
            await RecordStore(acme).get(REGION, "other", f"{REGION}-other")
        own = "$JS.API.DIRECT.GET.VERDICTS_local.verdict.local.acme.*"
        assert (await acme.request(own, b"")).data == b"verdict"
        for body in (b'{"seq":2}', b'{"multi_last":["verdict.>"]}', b'{"last_by_subj":"verdict.local.other.j"}'):
            assert (await acme.request(own, body)).data == b"", "a body does not widen what the subject says"
        for lane in LANES:
            await acme.store(subjects.ingest(REGION, lane, "acme"), b"")
        with pytest.raises(NotPermitted):
            await acme.store(subjects.ingest(REGION, Lane.BATCH, "other"), b"")


async def test_an_unknown_key_and_no_key_are_turned_away_naming_the_setting(region: Guarded, tmp_path: Path):
    stranger = tmp_path / "stranger.seed"
    stranger.write_text(new_seed())
    for key in ({}, {"nkey_file": str(stranger)}):
        settings = nats_settings(region.server, connect_timeout_s=0.5, **key)
        with pytest.raises(ConfigError, match=r"nats\.nkey_file"):
            await Bus.connect(settings, name="worker")


@pytest.mark.parametrize("text", ["", "SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC", "U" * 56])
async def test_a_file_that_holds_no_seed_is_named(region: Guarded, tmp_path: Path, text: str):
    broken = tmp_path / "broken.seed"
    broken.write_text(text)
    with pytest.raises(ConfigError, match=r"nats\.nkey_file.*broken\.seed|nats\.nkey_file"):
        await Bus.connect(nats_settings(region.server, nkey_file=str(broken)), name="worker")
