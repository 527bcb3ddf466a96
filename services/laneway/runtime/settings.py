"""Every setting of every process, with its range and default: `laneway.toml`, LANEWAY_SECTION__KEY, or a flag.

One frozen object for each process, resolved once in main and passed down. Seconds are floats named `…_s`, sizes are
named `…_bytes`; secrets are given by file path only. Ranges also refuse NaN and infinities.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import msgspec.structs
from msgspec import Meta

from laneway.core.errors import ConfigError
from laneway.core.lanes import Lane
from laneway.core.selectors import Selector
from laneway.runtime import config_load
from laneway.runtime.engine_options import EngineOptions

KIB = 1024
MIB = 1024 * KIB

Seconds = Annotated[float, Meta(ge=0.0, le=2_592_000.0)]  # up to 30 days
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=2_592_000.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Factor = Annotated[float, Meta(gt=0.0, le=1000.0)]
Rate = Annotated[float, Meta(gt=0.0, le=1e12)]
Price = Annotated[float, Meta(ge=0.0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
PositiveCount = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Bytes = Annotated[int, Meta(ge=KIB, le=1 << 40)]
EngineName = Literal["openai", "openvino", "simulated", "triton", "trtllm", "trtllm_grpc"]
Slug = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z", extra={"words": "1 to 64 of A-Z a-z 0-9 _ -"})]
SlugOrEmpty = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z", extra={"words": "at most 64 of A-Z a-z 0-9 _ -"})]
# Job ids carry the region: core.ids.
RegionSlug = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,27}\Z", extra={"words": "1 to 27 of A-Z a-z 0-9 _ -"})]
Precision = Literal["", "fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]
# Abilities that a request may use (runtime.wire.needs), and a pool may be kept for.
Feature = Literal[
    "logprobs", "top_logprobs", "min_p", "seed", "penalties", "logit_bias", "n", "min_tokens", "ignore_eos", "tools",
    "json_schema", "regex", "grammar", "adapters", "cache_salt", "image_input", "strict_isolation",
]  # fmt: skip
_HOST_PORT = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}"
Address = Annotated[str, Meta(pattern=rf"^{_HOST_PORT}\Z", extra={"words": "host:port; port 0 takes a free one"})]
AddressOrEmpty = Annotated[str, Meta(pattern=rf"^({_HOST_PORT})?\Z", extra={"words": "host:port or empty"})]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


class ProcessSettings(Section, frozen=True):
    ready_file: str = ""  # written once the service can serve: JSON with its addresses
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console in a terminal
    metrics_listen: AddressOrEmpty = ""  # Prometheus over HTTP; empty: none
    metrics_remote: bool = False  # other hosts may read the metrics, which are in the clear and ask for no credential
    drain_s: Seconds = 30.0  # most time that live calls and jobs get after SIGTERM


class RegionSettings(Section, frozen=True):
    name: RegionSlug = "local"
    zones: tuple[Slug, ...] = ()


class NatsSettings(Section, frozen=True):
    url: str = "nats://127.0.0.1:4222"  # several, comma-separated
    user: str = ""
    password_file: str = ""
    token_file: str = ""
    credentials_file: str = ""  # NATS .creds
    nkey_file: str = ""  # the seed of an nkey, as `laneway secrets` makes one for each role
    tls_ca_file: str = ""  # who may have signed the server's certificate; empty: whom this machine trusts
    tls_cert_file: str = ""  # this process's own certificate, for servers that ask for one
    tls_key_file: str = ""
    connect_timeout_s: PositiveSeconds = 2.0
    request_timeout_s: PositiveSeconds = 2.0
    reconnect_wait_s: PositiveSeconds = 0.25  # jittered
    ping_interval_s: PositiveSeconds = 5.0
    replicas: Literal[1, 3, 5] = 1
    ack_wait_priority_s: PositiveSeconds = 3.0
    ack_wait_deferrable_s: PositiveSeconds = 10.0
    ack_wait_batch_s: PositiveSeconds = 30.0
    retention_s: PositiveSeconds = 86_400.0  # records outlive their deadline by this
    records_bytes_max: Bytes = 1024 * MIB
    objects_bytes_max: Bytes = 1024 * MIB  # large prompts and results
    checkpoints_bytes_max: Bytes = 256 * MIB
    ingest_bytes_max: Bytes = 64 * MIB
    verdicts_bytes_max: Bytes = 64 * MIB
    dead_bytes_max: Bytes = 64 * MIB

    def __post_init__(self) -> None:
        _check_pair(self.tls_cert_file, self.tls_key_file)

    @property
    def ack_wait_s(self) -> Mapping[Lane, float]:
        return {
            Lane.PRIORITY: self.ack_wait_priority_s,
            Lane.DEFERRABLE: self.ack_wait_deferrable_s,
            Lane.BATCH: self.ack_wait_batch_s,
        }


class GrpcSettings(Section, frozen=True):
    """Both ends of a connection, set together: a server closes connections of clients that ping more often than it
    permits."""

    request_bytes_max: Bytes = 8 * MIB  # held whole while a call is accepted
    response_bytes_max: Bytes = 16 * MIB
    metadata_bytes_max: Bytes = 16 * KIB
    keepalive_s: PositiveSeconds = 30.0  # client and server ping an idle connection this often
    keepalive_timeout_s: PositiveSeconds = 10.0
    keepalive_permit_s: PositiveSeconds = 5.0  # least gap between a client's pings that the server permits
    calls_max: PositiveCount = 10_000  # live calls of one server; more are refused
    # TLS. A server with a certificate speaks nothing else; a client with a tls_ca_file neither.
    tls_cert_file: str = ""  # this process's own certificate, as a server or towards servers that ask for one
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # of a server: callers must show a certificate that these have signed
    tls_ca_file: str = ""  # of a client: who may have signed a server's certificate

    def __post_init__(self) -> None:
        _check_pair(self.tls_cert_file, self.tls_key_file)
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError(
                "tls_client_ca_file asks callers for certificates, so it needs tls_cert_file and tls_key_file"
            )


def _check_pair(cert_file: str, key_file: str) -> None:
    if bool(cert_file) != bool(key_file):
        raise ValueError("tls_cert_file and tls_key_file go together: give both or neither")


class TenantJobsMax(Section, frozen=True):
    """Open jobs of one tenant in one lane, accepted and not ended; more are refused. 0: no limit."""

    priority: Count = 1_000
    deferrable: Count = 100_000
    batch: Count = 100_000

    @property
    def by_lane(self) -> Mapping[Lane, int]:
        return {Lane.PRIORITY: self.priority, Lane.DEFERRABLE: self.deferrable, Lane.BATCH: self.batch}


class AdmissionSettings(Section, frozen=True):
    listen: Address = "127.0.0.1:7070"
    tokens_file: str = ""  # empty: only loopback callers, as tenant `default`
    insecure_remote: bool = False  # serve other hosts without credentials; for tests behind a firewall
    publish_s_max: Annotated[float, Meta(gt=0.0, le=60.0)] = 10.0  # an accepted job is published within this
    beat_s: PositiveSeconds = 1.0
    silence_s: PositiveSeconds = 3.0  # a stream that heard nothing for this long reads the record
    stream_buffer_bytes: Bytes = 256 * KIB  # of one caller; then the stream pauses
    delivered_ids_max: Tokens = 65_536  # token ids a door keeps for each stream, to hand over
    tokenizer_threads: PositiveCount = 2
    coalesce_priority_s: Seconds = 0.02  # pieces closer than this may be joined; the first and the last never wait
    coalesce_priority_streams: Count = 32  # live streams from which priority pieces are joined at all
    coalesce_deferrable_s: Seconds = 0.05
    coalesce_batch_s: Seconds = 0.25
    ingest: bool = True  # consume ingest.<region>.>
    ingest_inflight: PositiveCount = 400  # messages of producers that are worked on at once
    storage_fraction_max: Fraction = 0.8  # admission refuses above this share of the account's storage
    storage_poll_s: PositiveSeconds = 2.0
    tenant_jobs_max: TenantJobsMax = TenantJobsMax()  # the scheduler needs the same: its plan names who comes near
    tenant_streams_max: Count = 5_000  # live streams of one tenant in one admission process; 0: no limit


class SchedulerSettings(Section, frozen=True):
    listen: Address = "127.0.0.1:7071"
    provision: bool = True  # make the region's streams at start; false where `laneway provision` does it
    plan_interval_s: PositiveSeconds = 0.25
    plan_valid_s: PositiveSeconds = 3.0
    leader_ttl_s: PositiveSeconds = 3.0
    sweep_s: PositiveSeconds = 2.0


class RoutingSettings(Section, frozen=True):
    listen: Address = "127.0.0.1:7072"
    digest_interval_s: PositiveSeconds = 1.0
    digest_valid_s: PositiveSeconds = 5.0


class WorkerSettings(Section, frozen=True):
    name: SlugOrEmpty = ""  # stable across restarts; empty: made from host and process id
    pool: SlugOrEmpty = ""  # empty: the catalogue's first pool
    engine: EngineName | Literal[""] = ""  # one of the pool's other_engines, run as engine_options here say; or empty
    slots: Count = 0  # 0: the pool's
    pull_fallback_s: PositiveSeconds = 0.25
    step_timeout_s: PositiveSeconds = 30.0  # an engine silent for this long with work is hung, and started again
    engine_options: EngineOptions = EngineOptions()  # for pools whose model entry has none, and with worker.engine


class LaneDefaults(Section, frozen=True):
    """What a contract gets where the caller says nothing."""

    ttft_target_s: Annotated[float, Meta(ge=0.001, le=3600.0)]
    tpot_target_s: Annotated[float, Meta(ge=0.001, le=60.0)]
    deadline_s: PositiveSeconds  # from receipt


class PolicySettings(Section, frozen=True):
    """Parameters of the pure policy; docs/policy.md says what each does."""

    isolation: Literal["slo", "strict"] = "slo"  # of priority contracts that do not say, where a pool can keep it
    priority: LaneDefaults = LaneDefaults(ttft_target_s=1.0, tpot_target_s=0.1, deadline_s=60.0)
    deferrable: LaneDefaults = LaneDefaults(ttft_target_s=600.0, tpot_target_s=1.0, deadline_s=3600.0)
    batch: LaneDefaults = LaneDefaults(ttft_target_s=3600.0, tpot_target_s=10.0, deadline_s=86_400.0)
    margin_s_min: Seconds = 0.5  # latest start = deadline - service - max(margin_s_min, margin_fraction x service)
    margin_fraction: Fraction = 0.1
    lower_lane_floor: Fraction = 0.1  # share of a pool's turns that the lower lanes always get
    deferrable_weight: Factor = 4.0  # against batch_weight
    batch_weight: Factor = 1.0
    tenant_weights: Mapping[Slug, Factor] = msgspec.field(default_factory=dict)  # shares of a lane; 1 for all others
    hold_windows: bool = True  # parked work with slack waits for hours with less priority work, once a day was seen
    coalesce: bool = True  # parked jobs wait for others with the same prompt beginning, for seconds
    batch_workers_max: Count | None = None  # that batch work alone may ask of a pool; unset: as many as are planned
    refusal_jitter_min: Factor = 0.8
    refusal_jitter_max: Factor = 1.3
    retry_after_s_min: PositiveSeconds = 0.1
    retry_after_s_max: PositiveSeconds = 30.0
    retry_place_s_max: PositiveSeconds = 300.0  # how far ahead a refusal for its ETA may be promised a place
    resume_margin: Fraction = 0.1  # room asked for before a refusing lane opens again
    audit_fraction: Fraction = 0.01  # of what an ETA speaks against, tried all the same: guards against a wrong model
    ready_ahead_s: Seconds = 2.0  # released work that a pool may hold beyond its free slots
    priority_reserved_slots: Count | None = None  # lower lanes leave at least these free; unset: 1 from 4 slots, else 0
    lower_lane_prefills_max: PositiveCount = 1  # lower-lane jobs of a worker without their first token
    interference_budget: bool = True  # lower-lane prompts go to an engine as running priority work allows; off: at once
    slices: bool = True  # long prompts go in slices, where the engine's prefix cache finds them again; off: whole
    theta: Fraction = 0.8  # share of a TPOT target that priority work may be brought to, to begin with
    theta_min: Fraction = 0.5  # what was measured moves it between these
    theta_max: Fraction = 0.9
    ttft_guard_fraction: Fraction = 0.25  # of a TTFT target, what prompts of lower lanes in an engine may take
    strict_tpot_factor: Annotated[float, Meta(ge=1.0, le=10.0)] = 1.05  # the same for tokens of STRICT isolation
    headroom_window_s: Annotated[float, Meta(ge=0.1, le=60.0)] = 2.0  # lower lanes leave room for what comes in this
    headroom_z: Annotated[float, Meta(ge=0.0, le=10.0)] = 2.33  # spreads beyond the mean; 0: nothing is learned
    steal_ttft_share: Fraction = 0.25  # a job waits for its home's worker at most this part of its TTFT target
    preemptions_max: Count = 2  # times that a running lower-lane job may yield to priority; 0: never
    preempt_done_max: Fraction = 0.8  # a job with more of its predicted output runs on
    preempt_slack_s_min: Seconds = 20.0  # that a job keeps beyond what going on costs it; with less it does not yield
    preempt_delay_s: Seconds = 0.05  # a full worker leaves a priority job to workers with room for so long
    preempt_delay_elsewhere_s: Seconds = 0.5  # the same while the plan shows room elsewhere
    single_flight: bool = True  # identical deterministic jobs of a tenant share one run while they meet in a worker
    stale_plan_factor: Factor = 2.0  # estimates are multiplied by this while the plan is stale
    kv_prediction: bool = True  # engines that hand KV out as sequences grow take jobs by their predicted lengths
    kv_target: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.95  # share of their KV that predicted peaks may fill

    def __post_init__(self) -> None:
        if self.refusal_jitter_min > self.refusal_jitter_max:
            raise ValueError("refusal_jitter_min is above refusal_jitter_max")
        if self.retry_after_s_min > self.retry_after_s_max:
            raise ValueError("retry_after_s_min is above retry_after_s_max")

    def lane(self, lane: Lane) -> LaneDefaults:
        return {Lane.PRIORITY: self.priority, Lane.DEFERRABLE: self.deferrable, Lane.BATCH: self.batch}[lane]


class ModelSettings(Section, frozen=True):
    """One tier of a model and the pool that serves it. Tiers of a model go from the cheapest to the best."""

    name: Slug
    tier: Slug = "small"
    pool: SlugOrEmpty = ""  # empty: <name>-<tier>
    engine: EngineName = "openvino"
    other_engines: tuple[EngineName, ...] = ()  # that some of its workers have instead; worker.engine says which
    tokenizer: str = ""  # "bytes", "smollm2", a .gguf or tokenizer.json path; empty: smollm2, or bytes if simulated
    context_length: Tokens = 8192
    vocabulary_size: Annotated[int, Meta(ge=0, le=10_000_000)] = 0  # 0: that of a named tokenizer
    slots: PositiveCount = 8
    workers: Count = 2
    kv_tokens: Tokens = 16_384
    exact: bool = False  # same text alone, batched and resumed; slower
    max_tokens_default: Tokens = 256
    temperature_default: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    queue_length: Count = 32
    load_s: PositiveSeconds | None = None  # until a cold worker serves; unset: as its profile has it, or 10 s
    prefill_tokens_per_s: Rate | None = None  # until measured; unset: as its profile has it, or 1000
    decode_tokens_per_s: Rate | None = None  # of one sequence, until measured; unset: as its profile has it, or 50
    price_per_million_prompt_tokens: Price = 0.0
    price_per_million_completion_tokens: Price = 0.0
    price_per_device_s: Price = 0.0  # of a second of one worker; a job pays for the share that its slot is
    weights: str = ""  # what is served: a file, folder or name; openvino: the model_file where that is not set
    precision: Precision = ""  # of the weights: another precision is another tier
    # Which jobs of its tier the pool takes, where the tier has several; empty or 0: any.
    lanes: tuple[Lane, ...] = ()
    prompt_tokens_min: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    prompt_tokens_max: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    features: tuple[Feature, ...] = ()  # abilities, of which a job must use one
    engine_options: EngineOptions | None = None  # unset: worker.engine_options
    home_slots: Annotated[int, Meta(ge=0, le=64)] | None = None  # affinity slots; unset: as many as workers; 0: none
    bulk: bool = False  # lower-lane prompts may be submitted whole where the engine has no prefix cache
    profile: str = ""  # of the engine, as `laneway calibrate engine` writes it: prior of step times and KV capacity

    def __post_init__(self) -> None:
        if self.max_tokens_default >= self.context_length:
            raise ValueError("max_tokens_default must be below context_length")
        if self.kv_tokens < self.context_length and self.engine != "simulated":
            raise ValueError("kv_tokens must hold one sequence of context_length tokens")
        if self.prompt_tokens_max and self.prompt_tokens_max < self.prompt_tokens_min:
            raise ValueError("prompt_tokens_max must not be below prompt_tokens_min")
        elsewhere = [
            e for e in (self.engine, *self.other_engines) if e in ("openai", "triton", "trtllm", "trtllm_grpc")
        ]
        if elsewhere and not self.tokenizer:
            raise ValueError(f"tokenizer must be that of the model which the engine of a {elsewhere[0]} pool serves")

    @property
    def pool_name(self) -> str:
        return self.pool or f"{self.name}-{self.tier}"

    @property
    def selector(self) -> Selector:
        return Selector(self.lanes, self.prompt_tokens_min, self.prompt_tokens_max, self.features)


class Settings(Section, frozen=True):
    process: ProcessSettings = ProcessSettings()
    region: RegionSettings = RegionSettings()
    nats: NatsSettings = NatsSettings()
    grpc: GrpcSettings = GrpcSettings()
    admission: AdmissionSettings = AdmissionSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    routing: RoutingSettings = RoutingSettings()
    worker: WorkerSettings = WorkerSettings()
    policy: PolicySettings = PolicySettings()
    models: tuple[ModelSettings, ...] = (ModelSettings(name="chat"),)

    def __post_init__(self) -> None:
        pools = [m.pool_name for m in self.models]
        if twice := sorted({p for p in pools if pools.count(p) > 1}):
            raise ValueError(f"several models have the pool {', '.join(twice)}")
        if not self.models:
            raise ValueError("models is empty: nothing could be served")

    def model_of(self, pool: str) -> ModelSettings:
        """The entry that defines a pool."""
        found = next((m for m in self.models if m.pool_name == pool), None)
        if found is None:
            raise ConfigError(f"there is no pool {pool!r}; known: {', '.join(m.pool_name for m in self.models)}")
        return found

    def engine_options_of(self, pool: str) -> EngineOptions:
        """How a worker of this pool runs its engine."""
        model = self.model_of(pool)
        other = self.worker.engine not in ("", model.engine)
        options = (None if other else model.engine_options) or self.worker.engine_options
        if model.weights and not options.model_file and (self.worker.engine or model.engine) == "openvino":
            options = msgspec.structs.replace(options, model_file=model.weights)
        return msgspec.structs.replace(options, exact=options.exact or model.exact)


def load_settings(
    *,
    config: str | Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Resolves all settings of this process. ConfigError names the key, its origin and what is allowed."""
    return load_settings_with_origins(config=config, flags=flags, environ=environ, directory=directory).settings


def load_settings_with_origins(
    *,
    config: str | Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> config_load.Loaded[Settings]:
    """As load_settings, with the origin of each value: for `laneway config show`."""
    return config_load.load(
        Settings,
        config=config,
        flags=flags,
        environ=os.environ if environ is None else environ,
        directory=directory,
    )


def read_secret(path: str, key: str) -> str:
    """The secret in the file that the setting `key` names, without the newline at its end."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{key} = {path!r} cannot be read: {why}") from None
    if not text:
        raise ConfigError(f"{key} = {path!r} is an empty file")
    return text
