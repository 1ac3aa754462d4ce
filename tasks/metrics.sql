-- One row: what a batch of rollouts came to, and what it cost. Calls and tokens are those of the
-- trained roles in every attempt, also where the rollout failed: they were sampled, and paid for.
with

spans as (

    select
        *,
        list_contains($trained, role) as trained

    from read_parquet($spans)

),

rollouts as (

    select
        rollout_id,
        arg_max(reward, attempt) filter (where reward_name = 'reward') as reward,
        max(attempt) > 0 as retried

    from spans
    group by rollout_id

),

outcomes as (

    select
        count(reward) as "rollouts/ok",
        count(*) - count(reward) as "rollouts/failed",
        count(*) filter (where retried) as "rollouts/retried",
        list(reward order by rollout_id) filter (where reward is not null) as rewards

    from rollouts

),

calls as (

    select
        count(*) filter (where trained) as "calls",
        sum(len(prompt_token_ids)) filter (where trained) as "tokens/prompt",
        sum(len(response_token_ids)) filter (where trained) as "tokens/sampled",
        sum(prefix_len) filter (where trained) as reused,
        count(*) filter (where not trained) as "calls/other_roles"

    from spans
    where kind = 'llm' and error_type is null

)

select
    outcomes.*,
    "calls",
    coalesce("tokens/prompt", 0)::bigint as "tokens/prompt",
    coalesce("tokens/sampled", 0)::bigint as "tokens/sampled",
    -- The share of the prompts' tokens that are an earlier call's, kept as they were sampled.
    reused / "tokens/prompt" as "prefix/reused_fraction",
    "calls/other_roles"

from outcomes
cross join calls
