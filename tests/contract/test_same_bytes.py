"""A worker serialises a chunk once, doors forward it to Generate and to Watch: both must read the same bytes."""

from google.protobuf.message import Message

from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2, task_pb2

EVENTS = (
    pb.GenerateResponse(
        accepted=pb.Accepted(job_id="local-1", verdict=common_pb2.Verdict(kind=common_pb2.VERDICT_KIND_ACCEPTED))
    ),
    pb.GenerateResponse(chunk=task_pb2.Chunk(first_index=7, token_ids=[1, 2], text="é", output=1)),
    pb.GenerateResponse(finished=pb.Finished(job_id="local-1", attempt=2)),
)


def shape(kind: type[Message]) -> dict[str, tuple[int, int, str, str]]:
    """Of each field what decides its bytes."""
    return {
        field.name: (
            field.number,
            field.type,
            field.message_type.full_name if field.message_type is not None else "",
            field.containing_oneof.name if field.containing_oneof is not None else "",
        )
        for field in kind.DESCRIPTOR.fields
    }


def test_generate_and_watch_answer_with_equal_fields_and_numbers():
    assert shape(pb.GenerateResponse) == shape(pb.WatchResponse)


def test_each_event_of_generate_reads_as_the_same_event_of_watch():
    assert {event.WhichOneof("event") for event in EVENTS} == set(shape(pb.GenerateResponse)), "every event is tried"
    for event in EVENTS:
        data = event.SerializeToString(deterministic=True)
        watched = pb.WatchResponse.FromString(data)
        assert watched.WhichOneof("event") == event.WhichOneof("event")
        assert watched.SerializeToString(deterministic=True) == data
