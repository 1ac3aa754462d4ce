-- One row: what a batch of rollouts came to, and what it cost. Calls and tokens are those of the
-- trained roles in every attempt, also where the rollout failed: they were sampled, and paid for.
-- What an attempt was given again from an earlier one was paid for there.
with
spans as (
    select
        *,
        list_contains($trained, role) as trained
    from parquet_rows($spans)
),
rollouts as (
    select * from rollout_attempts('spans')
),
asks as (
    select
        rollout_id,
        count(*) filter (where kind = 'llm') = 0 as silent,
        -- What its agent asked beyond the recipe's limit; the door noted how often.
        sum((attributes ->> '$.calls_refused')::bigint) as refused,
        any_value(error_type) filter (where kind = 'reward') as rewarded_error
    from spans
    group by rollout_id
),
outcomes as (
    select
        count(*) filter (where has_ended) as "rollouts/ok",
        count(*) filter (where not has_ended) as "rollouts/failed",
        count(*) filter (where attempts > 1) as "rollouts/retried",
        count(*) filter (where silent and has_ended) as "rollouts/without_calls",
        coalesce(sum(refused), 0)::bigint as "calls/refused",
        list(rewarded_error) filter (where rewarded_error is not null) as rewarded_errors,
        list(reward order by rollout_id) filter (where reward is not null) as rewards
    from rollouts
    join asks using (rollout_id)
),
groups as (
    select list(size) as group_sizes
    from (select {'group_id': group_id, 'size': count(*)} as size from rollouts group by group_id)
),
priced as (
    -- What its agent gave a role, in an attempt that was rewarded; and what a call cost that no
    -- policy answered, in any.
    select
        role,
        span_id,
        if(
            kind = 'credit'
            and call is null
            and bool_or(reward_name = 'reward') over (partition by rollout_id, attempt),
            reward,
            null
        ) as earned,
        if(
            kind = 'llm' and recalled is not true, (attributes ->> '$.cost')::double, null
        ) as cost
    from spans
),
roles as (
    select list({'role': role, 'rewards': rewards, 'costs': costs} order by role) as roles
    from (
        select
            role,
            list(earned order by span_id) filter (where earned is not null) as rewards,
            list(cost order by span_id) filter (where cost is not null) as costs
        from priced
        where role is not null
        group by role
    )
),
calls as (
    select
        count(*) filter (where trained) as "calls",
        sum(len(prompt_token_ids)) filter (where trained) as "tokens/prompt",
        sum(len(response_token_ids)) filter (where trained) as "tokens/sampled",
        sum(kept_tokens) filter (where trained) as kept,
        avg((attributes ->> '$.format.valid')::boolean::int) filter (where trained) as formed,
        avg((attributes ->> '$.tool_choice.kept')::boolean::int) filter (where trained) as heeded,
        count(*) filter (where not trained) as "calls/other_roles"
    from spans
    where kind = 'llm' and error_type is null and recalled is not true
),
recalls as (
    select
        count(*) as "recall/calls",
        coalesce(sum(len(response_token_ids)), 0)::bigint as "recall/tokens",
        count(distinct rollout_id) as "recall/rollouts"
    from spans
    where kind = 'llm' and recalled
),
clock as (
    -- A lost call has no end.
    select
        (epoch_us(max(ended)) - epoch_us(min(started))) / 1e6 as sampling,
        list((epoch_us(ended) - epoch_us(started)) / 1e6) filter (where kind in ('reward', 'error'))
            as attempts
    from spans
),
asked as (
    -- A call of a rollout, over its attempts. One that failed is not recalled but played anew.
    select
        rollout_id,
        count(distinct request_sha) as requests
    from spans
    where kind = 'llm'
    group by rollout_id, role, call, gen_ai_request_seed
),
others as (
    select
        -- Rollouts that were started anew and asked something else than before.
        (select count(distinct rollout_id) from asked where requests > 1) as "recall/diverged",
        (select count(*) from spans where kind = 'begun') as "calls/lost"
)
select
    outcomes.*,
    group_sizes,
    roles,
    "calls",
    coalesce("tokens/prompt", 0)::bigint as "tokens/prompt",
    coalesce("tokens/sampled", 0)::bigint as "tokens/sampled",
    -- The share of the prompts' tokens that are an earlier call's, kept as they were sampled.
    kept / "tokens/prompt" as "tokens/kept_fraction",
    -- The share of the answers that kept to the form, or called the tools, that were asked for.
    formed as "format/valid_fraction",
    heeded as "tool_choice/kept_fraction",
    "calls/other_roles",
    recalls.*,
    others.*,
    sampling,
    attempts
from outcomes
cross join groups
cross join roles
cross join calls
cross join recalls
cross join others
cross join clock
