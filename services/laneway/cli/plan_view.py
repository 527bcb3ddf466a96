"""`laneway plan`: what the scheduler goes by now, a pool a line, and the parameters in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laneway.cli import connect
from laneway.cli.connect import JsonOption, SchedulerOption, TimeoutOption, TokenOption
from laneway.cli.console import moment, print_json, print_table, run, say, seconds

if TYPE_CHECKING:
    from laneway.core.fleet import Plan, PoolPlan

COLUMNS = ("POOL", "WORKERS", "WANTED", "FREE", "KEPT", "PRIORITY/S", "BURSTS", "LOWER TOKENS/S", "HOMES")


def plan(
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show what the scheduler plans with: workers wanted and why, places kept free, homes, parameters in force."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            found = await client.get_plan(timeout_s=timeout)
        if as_json:
            print_json(found)
            return
        print_table(COLUMNS, [_row(pool) for pool in found.pools], empty="the plan has no pools", folded=["HOMES"])
        for line in policy_lines(found):
            say(line)

    run(work)


def policy_lines(plan: Plan) -> list[str]:
    """What is to be said of the parameters: their version, and what is wrong with the file that they come from."""
    policy = plan.policy
    if not policy.version:
        return ["parameters: each service has its own; the scheduler publishes none"]
    lines = [f"parameters: version {policy.version}, of {moment(policy.loaded_s)}; laneway config show policy --live"]
    if policy.refused:
        lines.append(f"the scheduler's settings as they are now are NOT in force: {policy.refused}")
    if policy.restart:
        lines.append(f"changed since the scheduler started, and waiting for a restart: {', '.join(policy.restart)}")
    return lines


def _row(pool: PoolPlan) -> tuple[object, ...]:
    return (
        pool.pool,
        pool.workers,
        f"{pool.desired_workers} ({pool.desired_reason})" if pool.desired_reason else pool.desired_workers,
        f"{pool.free_slots}/{pool.slots}",
        pool.reserved_slots,
        round(pool.priority_per_s, 2),
        round(pool.burstiness, 1),
        round(pool.lower_tokens_per_s) or "",
        ", ".join(_home(pool, home.home) for home in pool.homes),
    )


def _home(pool: PoolPlan, name: str) -> str:
    home = next(each for each in pool.homes if each.home == name)
    waits = f" {home.ready} waiting" if home.ready else ""
    oldest = f" for {seconds(home.oldest_wait_s)}" if home.ready and home.oldest_wait_s else ""
    return f"{name}={home.worker_id or 'nobody'}{waits}{oldest}"
