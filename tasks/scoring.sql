-- One row per trajectory, in the order of their file: the call whose prompt its tokens grew from,
-- and which was rendered of its messages alone.
with recursive calls as (
    select
        rollout_id,
        attempt,
        role,
        call,
        kept_call,
        messages,
        tools,
        attributes ->> '$.instructions' as instructions,
        prompt_token_ids
    from parquet_rows($spans)
    where kind = 'llm' and error_type is null
),
origins as (
    select
        rollout_id,
        attempt,
        role,
        first_call,
        first_call as call
    from parquet_rows($trajectories)

    union all

    select
        origins.rollout_id,
        origins.attempt,
        origins.role,
        first_call,
        kept_call
    from origins
    join calls using (rollout_id, attempt, role, call)
    where kept_call is not null
)
select
    messages,
    tools,
    instructions,
    prompt_token_ids
from origins
join calls using (rollout_id, attempt, role, call)
where kept_call is null
order by rollout_id, role, first_call
