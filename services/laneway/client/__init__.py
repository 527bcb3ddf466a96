"""What callers import: a typed client with deadlines, cancellation and a retry budget.

    from laneway.client import Client

    async with Client("127.0.0.1:7070") as client:
        async with client.generate(model="chat", messages=[{"role": "user", "content": "Hi"}]) as stream:
            async for chunk in stream:
                print(chunk.text, end="")
        print(stream.finished.usage)

laneway.client.sync has the same for programs without an event loop.

Every error is a LanewayError: `reason`, `field`, `retry_after_s` and `phase` say what to do about it.
"""

from laneway.client.admission import Client
from laneway.client.channel import ServiceConnection, Surroundings
from laneway.client.many import ManyItem, ManyOutcome
from laneway.client.operators import RoutingClient, SchedulerClient
from laneway.client.request import RequestFields
from laneway.client.stream import BrokenStream, TokenStream
from laneway.client.values import (
    Cancelled,
    Chunk,
    DeadAttempt,
    DeadLetter,
    ExplainedStep,
    Explanation,
    Finished,
    Job,
    LaneStatus,
    Message,
    Model,
    Quote,
    Region,
    RegionModel,
    RegionScore,
    Route,
    Submitted,
    Tool,
    ToolCall,
    Worker,
)
from laneway.core.errors import (
    Aborted,
    AlreadyExists,
    Code,
    DeadLetterNotFound,
    DeadlineExceeded,
    EngineFailed,
    Infeasible,
    InvalidRequest,
    JobCancelled,
    JobNotFound,
    LaneSaturated,
    LanewayError,
    NotFound,
    NotRequeueable,
    OutcomeUnknown,
    PermissionDenied,
    RegionNotAllowed,
    StorageFull,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from laneway.core.fleet import LanePlan, Plan, PoolPlan
from laneway.core.job import Contract, JobError, Result, Timings, TokenLogprob, Usage, Verdict
from laneway.core.lanes import FinishReason, Isolation, JobState, Lane, OnDisconnect, Phase, VerdictKind
from laneway.policy.retry import RetryParams
from laneway.runtime.tls import channel_credentials

__all__ = [
    "Aborted",
    "AlreadyExists",
    "BrokenStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Code",
    "Contract",
    "DeadAttempt",
    "DeadLetter",
    "DeadLetterNotFound",
    "DeadlineExceeded",
    "EngineFailed",
    "ExplainedStep",
    "Explanation",
    "FinishReason",
    "Finished",
    "Infeasible",
    "InvalidRequest",
    "Isolation",
    "Job",
    "JobCancelled",
    "JobError",
    "JobNotFound",
    "JobState",
    "Lane",
    "LanePlan",
    "LaneSaturated",
    "LaneStatus",
    "LanewayError",
    "ManyItem",
    "ManyOutcome",
    "Message",
    "Model",
    "NotFound",
    "NotRequeueable",
    "OnDisconnect",
    "OutcomeUnknown",
    "PermissionDenied",
    "Phase",
    "Plan",
    "PoolPlan",
    "Quote",
    "Region",
    "RegionModel",
    "RegionNotAllowed",
    "RegionScore",
    "RequestFields",
    "Result",
    "RetryParams",
    "Route",
    "RoutingClient",
    "SchedulerClient",
    "ServiceConnection",
    "StorageFull",
    "Submitted",
    "Surroundings",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "Tool",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Usage",
    "Verdict",
    "VerdictKind",
    "Worker",
    "channel_credentials",
]
