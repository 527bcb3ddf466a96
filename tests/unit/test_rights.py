"""The lists of rights as values: what they cover, and that they name nothing that is not the role's."""

from __future__ import annotations

import pytest

from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.lanes import Lane
from laneway.runtime.layout import region_layout
from laneway.runtime.rights import (
    SERVICES,
    Rights,
    Role,
    inbox_prefix,
    producer_name,
    producer_rights,
    region_streams,
    service_rights,
)
from laneway.runtime.settings import NatsSettings

ROLES = (*SERVICES, Role.OPERATOR)
EVERYWHERE = {"$JS.API.INFO", "$SYS.REQ.USER.INFO", "tok.*", "ctl.*", "ctl.routing.*", "digest.*"}


def covers(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern matches a subject, which may be a pattern itself."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or (token != "*" and token != given[position]):
            return False
    return len(wanted) == len(given)


def everything(rights: Rights) -> tuple[str, ...]:
    return (*rights.publish, *rights.subscribe)


@pytest.mark.parametrize("role", ROLES)
def test_all_that_a_role_may_do_is_in_its_own_region(role: Role):
    elsewhere = [
        subject
        for subject in everything(service_rights(role, "eu-1"))
        if "eu-1" not in subject and subject not in EVERYWHERE and not subject.startswith(inbox_prefix(role))
    ]
    assert elsewhere == []


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_allowed_that_covers_everything(role: Role):
    for subject in everything(service_rights(role, "eu")):
        assert not subject.startswith((">", "*", "$JS.>", "$JS.API.>", "$JS.API.*", "$JS.ACK.>", "$KV.>", "_INBOX.")), (
            subject
        )
        assert not covers(subject, "$JS.API.STREAM.DELETE.JOBS_eu"), subject


def test_only_the_operator_makes_and_changes_streams_and_consumers_of_lanes():
    for role in ROLES:
        rights = service_rights(role, "eu")
        made = [
            wanted
            for wanted in ("STREAM.CREATE.BATCH_eu", "STREAM.UPDATE.JOBS_eu", "CONSUMER.CREATE.BATCH_eu.c.lane.eu.>")
            if any(covers(subject, f"$JS.API.{wanted}") for subject in rights.publish)
        ]
        assert bool(made) is (role is Role.OPERATOR), role


def test_the_operator_may_make_every_stream_of_the_layout():
    layout = region_layout("eu", Catalogue(()), NatsSettings(), NatsSettings().ack_wait_s)
    assert {stream.name for stream in layout} == set(region_streams("eu"))


def test_a_producer_gets_its_lanes_of_its_tenant():
    rights = producer_rights("eu", "acme", [Lane.BATCH])
    ingest = [subject for subject in rights.publish if subject.startswith("ingest.")]
    assert ingest == ["ingest.eu.batch.acme"]
    for subject in everything(rights):
        assert "acme" in subject
        assert not covers(subject, subject.replace("acme", "other"))


def test_each_producer_has_an_inbox_of_its_own():
    assert [producer_name(tenant) for tenant in ("default", "acme")] == ["producer", "producer-acme"]
    names = [*ROLES, *(producer_name(tenant) for tenant in ("default", "acme", "acme2"))]
    for name in names:
        inbox = f"{inbox_prefix(name)}.>"
        assert [other for other in names if covers(inbox, f"{inbox_prefix(other)}.x")] == [name]


def test_a_producers_rights_need_a_tenant():
    with pytest.raises(ValueError, match="tenant"):
        service_rights(Role.PRODUCER, "eu")


def test_objects_are_written_by_doors_and_workers_alone_and_taken_away_by_whoever_must():
    chunk, facts = "$O.OBJECTS_eu.C.acme.eu-1.task.x.0", "$O.OBJECTS_eu.M.bmFtZQ=="
    acts = {
        "write": (chunk, facts),
        "read": (f"$JS.API.DIRECT.GET.OBJ_OBJECTS_eu.{chunk}",),
        "remove": ("$JS.API.STREAM.PURGE.OBJ_OBJECTS_eu",),
    }
    may = {
        role: {
            act
            for act, subjects in acts.items()
            if all(any(covers(p, subject) for p in service_rights(role, "eu").publish) for subject in subjects)
        }
        for role in ROLES
    }
    assert may == {
        Role.ADMISSION: {"write", "read", "remove"},
        Role.WORKER: {"write", "read", "remove"},
        Role.SCHEDULER: {"remove"},
        Role.ROUTING: set(),
        Role.OPERATOR: {"read"},
    }
    publish = producer_rights("eu", "acme").publish
    assert [act for act, subjects in acts.items() if any(covers(p, s) for p in publish for s in subjects)] == ["read"]
    assert not any(covers(p, acts["read"][0].replace("acme", "other")) for p in publish)
    assert not any(covers(p, f"$JS.API.DIRECT.GET.OBJ_OBJECTS_eu.{facts}") for p in publish)


def test_a_worker_may_pull_from_every_home_slot_and_look_whether_there_are_more():
    publish = service_rights(Role.WORKER, "eu").publish
    for lane in Lane:
        for home in ("any", "h0", "h63"):
            name = f"{subjects.lane_stream('eu', lane)}.{subjects.consumer(lane, 'chat-small', home)}"
            for verb in ("MSG.NEXT", "INFO"):
                assert any(covers(pattern, f"$JS.API.CONSUMER.{verb}.{name}") for pattern in publish), (verb, name)
        stream = subjects.lane_stream("eu", lane)
        for verb in ("CREATE", "DELETE", "LIST"):
            assert not any(covers(pattern, f"$JS.API.CONSUMER.{verb}.{stream}.c") for pattern in publish), (
                verb,
                stream,
            )
