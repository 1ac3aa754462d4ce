-- One row per rollout of a batch: its reward, null if it failed or its agent gives none, the category
-- of its example, what its agent has measured, and what the calls came to that no policy answered.
-- Those are of every attempt, also where the rollout failed: they were paid for. What an attempt was
-- given again from an earlier one was paid for there.
with
spans as (
    select * from parquet_rows($spans)
),
examples as (
    select
        row_number() over () - 1 as place,
        json_extract_string(json, '$.example.category') as category
    from json_lines($shard)
),
rollouts as (
    select * from rollout_attempts('spans')
),
calls as (
    select
        rollout_id,
        role,
        span_id,
        gen_ai_usage_input_tokens as prompt,
        gen_ai_usage_output_tokens as sampled,
        (attributes ->> '$.cost')::double as cost
    from spans
    where kind = 'llm' and gen_ai_provider_name = 'other' and recalled is not true
),
measures as (
    select
        rollout_id,
        attempt,
        map(list(role order by role), list(reward order by role)) as measures
    from spans
    where kind = 'credit' and starts_with(role, 'measure/')
    group by rollout_id, attempt
),
spent as (
    select
        rollout_id,
        list({'role': role, 'calls': calls, 'priced': priced, 'prompt_tokens': prompt,
              'sampled_tokens': sampled, 'cost': cost} order by role) as spent
    from (
        select
            rollout_id,
            role,
            count(*) as calls,
            count(cost) as priced,
            sum(prompt)::bigint as prompt,
            sum(sampled)::bigint as sampled,
            sum(cost order by span_id) as cost
        from calls
        group by rollout_id, role
    )
    group by rollout_id
)
select
    rollouts.rollout_id,
    group_id,
    reward,
    category,
    coalesce(spent, []) as spent,
    coalesce(measures, map {}) as measures,
    has_ended as ended
from rollouts
left join measures
    on rollouts.rollout_id = measures.rollout_id
    and rollouts.attempt = measures.attempt
    and has_ended
left join spent on rollouts.rollout_id = spent.rollout_id
left join examples on place_of(group_id) = place
order by rollouts.rollout_id
