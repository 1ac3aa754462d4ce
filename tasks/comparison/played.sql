-- One row per example of a held-out shard, in the order of the dataset: the mean reward of its
-- rollouts that did not fail, the mean length of their answers and what all attempts have cost, by
-- the calls of the roles that are compared, and what was said in the rollout whose reward is nearest
-- to the mean: its first question, its last answer, and its calls.
with spans as (
    select * from parquet_rows($spans)
),
attempts as (
    select * from rollout_attempts('spans')
),
calls as (
    select
        rollout_id,
        attempt,
        span_id,
        role,
        call,
        started,
        gen_ai_usage_output_tokens as sampled,
        case when recalled is not true then (attributes ->> '$.cost')::double end as cost,
        messages ->> '$[#-1].content' as question,
        spoken(reply) as answer
    from spans
    where kind = 'llm' and error_type is null and list_contains($roles, role)
),
said as (
    select
        rollout_id,
        sum(sampled)::double as tokens,
        arg_min(question, call) as question,
        arg_max(answer, call) as answer,
        list({'asked': question, 'said': answer} order by started, role, call) as calls
    from calls
    join attempts using (rollout_id, attempt)
    group by rollout_id
),
paid as (
    select
        rollout_id,
        sum(cost order by span_id) as cost
    from calls
    group by rollout_id
),
rollouts as (
    select
        rollout_id,
        any_value(attributes ->> '$.example_id')::bigint as example_id,
        any_value(attributes ->> '$.example') as example,
        any_value(attempts.reward) as reward
    from spans
    join attempts using (rollout_id, attempt)
    where kind in ('reward', 'error')
    group by rollout_id
),
compared as (
    select
        *,
        abs(reward - avg(reward) over (partition by example_id)) as apart
    from rollouts
)
select
    example_id,
    any_value(example) as example,
    count(*) as rollouts,
    count(*) - count(reward) as failed,
    avg(reward order by rollout_id) as reward,
    avg(tokens order by rollout_id) as tokens,
    sum(cost order by rollout_id) as cost,
    arg_min(question, (coalesce(apart, 'infinity'), rollout_id)) as question,
    arg_min(answer, (coalesce(apart, 'infinity'), rollout_id)) as answer,
    coalesce(arg_min(calls, (coalesce(apart, 'infinity'), rollout_id)), []) as calls
from compared
left join said using (rollout_id)
left join paid using (rollout_id)
group by example_id
order by example_id
