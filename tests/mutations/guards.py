"""Guards against the faults of docs/faults.md, each with the change that takes it away and a test that must then fail.

A guard is named by the report it is against. `old` is a piece of the source that occurs once in its file; where code
moves on, it moves with it.
"""

from __future__ import annotations

from msgspec import Struct

WORKERS, SERVICES, SCHEDULER = "workers/laneway/workers", "services/laneway", "scheduler/laneway"


class Guard(Struct, frozen=True):
    report: str  # number of the row in docs/faults.md
    what: str  # what the guard sees to
    path: str
    old: str
    new: str
    test: str  # as the row names it


GUARDS = (
    Guard(
        "1",
        "a run that gave a token is not begun again",
        f"{SCHEDULER}/policy/retry.py",
        "    if tried.output_started:\n",
        "    if False:\n",
        "tests/wire/test_client.py::test_a_run_that_gave_a_token_is_never_begun_again",
    ),
    Guard(
        "2",
        "the bytes of a character are put together across tokens",
        f"{WORKERS}/text.py",
        "            text = self._decoder.decode(data)\n",
        '            text = data.decode(errors="replace")\n',
        "tests/unit/test_text.py::test_no_replacement_character_ever_leaves_for_sound_text",
    ),
    Guard(
        "3",
        "the beginning of a stop string is held",
        f"{WORKERS}/text.py",
        "        keep_from = self._unfinished_stop(text)\n",
        "        keep_from = len(text)\n",
        "tests/unit/test_text.py::test_a_stop_string_of_several_tokens_never_leaks",
    ),
    Guard(
        "4",
        "a caller who leaves ends his job",
        f"{SERVICES}/admission/application.py",
        "        if record.contract.on_disconnect is OnDisconnect.KEEP:\n",
        "        if True:\n",
        "tests/wire/test_admission_generate.py::test_a_caller_who_vanishes_frees_everything",
    ),
    Guard(
        "5",
        "a tenant's stream gives its place back however it ends",
        f"{SERVICES}/admission/tenants.py",
        "        self._streams.remove(self)\n",
        "        pass\n",
        "tests/wire/test_fault_counts.py::test_a_tenant_has_all_its_streams_after_ten_of_each_bad_end",
    ),
    Guard(
        "5",
        "a seat is given back however its run ends",
        f"{WORKERS}/runs.py",
        "            self._give_back(run)\n            self._suspects",
        "            self._suspects",
        "tests/wire/test_fault_counts.py::test_a_worker_has_all_its_slots_after_ten_of_each_bad_end",
    ),
    Guard(
        "7",
        "an engine that stands still gets no more time",
        f"{WORKERS}/ackwait.py",
        "        if now_s < self.due_s or steps == self.steps:\n",
        "        if now_s < self.due_s:\n",
        "tests/unit/test_worker_state.py::test_time_is_asked_for_at_a_third_and_only_while_the_engine_advances",
    ),
    Guard(
        "8",
        "a job whose starts fail is given up",
        f"{WORKERS}/claims.py",
        "    if strikes(record) >= STRIKES_MAX:\n",
        "    if False:\n",
        "tests/unit/test_worker_claims.py::test_a_job_with_three_failed_starts_is_given_up",
    ),
    Guard(
        "8",
        "the dead letter is stored before the message goes",
        f"{WORKERS}/run.py",
        "        what = await self._bench.dead_letters.before(what, self.delivery)\n",
        "",
        "tests/wire/test_dead_letters.py::test_a_crash_between_the_end_and_the_letter_loses_no_letter",
    ),
    Guard(
        "9",
        "a pull that got no answer is taken off the server",
        f"{SERVICES}/runtime/puller.py",
        "        if timed_out:\n            await self._abandon()\n",
        "",
        "tests/wire/test_puller.py::test_a_pull_that_was_given_up_claims_nothing_later",
    ),
    Guard(
        "10",
        "what is above the server's limit is never sent",
        f"{SERVICES}/runtime/connecting.py",
        "        if size > self.payload_bytes_max:\n",
        "        if False:\n",
        "tests/wire/test_bus.py::test_a_message_above_the_limit_is_refused_unsent_and_harms_nobody_else",
    ),
    Guard(
        "11",
        "the id of a message holds the attempt",
        f"{SERVICES}/runtime/lanes.py",
        'f"{record.job_id}:{record.attempt}:{kind}"',
        'f"{record.job_id}:{kind}"',
        "tests/wire/test_lanes.py::test_a_repeated_put_is_one_job_and_a_later_attempt_another",
    ),
    Guard(
        "11",
        "a requeue has one id",
        f"{SERVICES}/admission/dead_letters.py",
        "            job_id=ids.requeued_job_id(self._region, record.tenant, record.job_id),\n",
        "",
        "tests/wire/test_dead_letter_calls.py::test_a_repeated_requeue_gives_the_same_job_before_and_after_it_ended",
    ),
    Guard(
        "13",
        "a lower lane that waits has its turn",
        f"{SCHEDULER}/policy/pull.py",
        "    if params.floor_turns == 0 or turns.priority_run < params.floor_turns - 1:\n",
        "    if True:\n",
        "tests/unit/test_pull.py::test_the_floor_gives_one_turn_to_a_starved_lane",
    ),
    Guard(
        "14",
        "a record is written only over what was read",
        f"{SERVICES}/runtime/records.py",
        "            EXPECTED_SUBJECT_SEQUENCE: str(expected_sequence),\n",
        "",
        "tests/wire/test_records.py::test_of_eight_claims_at_once_exactly_one_wins",
    ),
    Guard(
        "15",
        "what waited past its deadline is ended",
        f"{SCHEDULER}/scheduler/sweeps.py",
        "        while self._deadlines and self._deadlines[0][0] <= now_s and len(out) < SWEEP_MAX:\n",
        "        while False:\n",
        "tests/wire/test_scheduler_sweeps.py::test_a_crowd_that_timed_out_leaves_nothing_behind",
    ),
    Guard(
        "16",
        "a job past its deadline is not claimed",
        f"{WORKERS}/claims.py",
        "    if now_s < write.stored.record.contract.deadline_s:\n",
        "    if True:\n",
        "tests/unit/test_worker_claims.py::test_a_job_past_its_deadline_expires",
    ),
    Guard(
        "17",
        "what cannot fit the context is refused at the door",
        f"{SCHEDULER}/policy/contract.py",
        "    if max_tokens > room:\n",
        "    if False:\n",
        "tests/wire/test_admission_requests.py::test_both_numbers_are_said_when_a_prompt_does_not_fit",
    ),
    Guard(
        "19",
        "a check of a range fails for what is no number",
        f"{SERVICES}/runtime/wire/checks.py",
        "    if not low <= value <= high:\n",
        "    if value < low or value > high:\n",
        "tests/unit/test_wire_requests.py::test_a_number_out_of_range_or_no_number_is_refused",
    ),
    Guard(
        "20",
        "an item that does not parse is told of by itself",
        f"{SERVICES}/admission/many.py",
        "        yield from _items_one_by_one(data)\n",
        '        raise InvalidRequest("the request is malformed") from None\n',
        "tests/wire/test_admission_many.py::test_an_item_that_does_not_parse_spoils_no_other_of_its_message",
    ),
    Guard(
        "21",
        "a job is taken from an owner who is dead",
        f"{WORKERS}/claims.py",
        "        elif owner_alive or not redelivered:\n",
        "        elif True:\n",
        "tests/wire/test_fault_redelivery.py::test_a_worker_that_dies_between_claim_and_first_token_leaves_nobody_waiting",
    ),
    Guard(
        "22",
        "a service that stops waits for its calls",
        f"{SERVICES}/runtime/grpc_server.py",
        "        quiet = await self._edge.wait_quiet(grace_s)\n",
        "        quiet = await self._edge.wait_quiet(0.0)\n",
        "tests/wire/test_grpc_server.py::TestDrain::test_live_calls_finish_and_new_ones_are_told_to_go_elsewhere",
    ),
    Guard(
        "23",
        "a refusal says when to try again",
        f"{SERVICES}/runtime/grpc_errors.py",
        "        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))\n",
        "",
        "tests/wire/test_grpc_server.py::TestStatuses::test_a_refusal_says_when_to_try_again",
    ),
    Guard(
        "12",
        "running lower work makes room for priority",
        f"{SCHEDULER}/policy/pull.py",
        "    if room.yields and short_of_room(lanes, room):\n",
        "    if False:\n",
        "tests/sim/test_preemption.py"
        "::test_a_priority_job_with_a_budget_of_2_s_starts_within_it_though_60_s_jobs_hold_all_slots",
    ),
    Guard(
        "S1",
        "what a run that yields has computed is kept",
        f"{WORKERS}/outcomes.py",
        "        return self in (Kind.HANDED_BACK, Kind.PREEMPTED, Kind.ENGINE_LOST)\n",
        "        return self in (Kind.HANDED_BACK, Kind.ENGINE_LOST)\n",
        "tests/wire/test_worker_preemption.py::test_a_batch_job_yields_its_slot_and_goes_on_where_it_was",
    ),
    Guard(
        "27",
        "the server permits the pings of its clients",
        f"{SERVICES}/runtime/grpc_options.py",
        '        ("grpc.http2.min_ping_interval_without_data_ms", _ms(settings.keepalive_permit_s)),\n',
        "",
        "tests/wire/test_grpc_server.py::TestKeepalive::test_pings_at_the_permitted_gap_are_answered",
    ),
    Guard(
        "29",
        "the same key with another body is another request",
        f"{SERVICES}/admission/service.py",
        "    return hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()\n",
        "    return hashlib.sha256(spec.model.encode()).digest()\n",
        "tests/unit/test_fault_same_request.py::test_requests_that_differ_in_one_field_are_different_requests",
    ),
)
