-- One row per rollout of a batch that was not left out: how it ended, and the conversations it held.
with

spans as (

    select * from read_parquet($spans)

),

attempts as (

    -- The attempt that earned the reward, or else the last one.
    select
        rollout_id,
        coalesce(max(attempt) filter (where reward_name = 'reward'), max(attempt)) as attempt

    from spans
    group by rollout_id

),

calls as (

    select
        *,
        list(prefix_call) over (partition by rollout_id, attempt, role) as continued

    from spans
    where kind = 'llm' and error_type is null

),

conversations as (

    select
        rollout_id,
        attempt,
        list(
            {'role': role, 'messages': messages::varchar, 'reply': reply::varchar}
            order by role, call
        ) as conversations

    from calls
    -- A call that another one continued is told by that one, which repeats its messages.
    where not list_contains(continued, call)
    group by rollout_id, attempt

),

outcomes as (

    select
        rollout_id,
        attempt,
        any_value(reward) filter (where reward_name = 'reward') as reward,
        any_value(error_type) filter (where kind = 'error') as error_type,
        any_value(error_message) filter (where kind = 'error') as error_message,
        list({'role': role, 'why': error_type || ': ' || error_message} order by ended)
            filter (where kind = 'refused') as refused

    from spans
    group by rollout_id, attempt
    having not bool_or(kind = 'left_out')

)

select
    outcomes.*,
    coalesce(conversations, []) as conversations

from outcomes
join attempts using (rollout_id, attempt)
left join conversations using (rollout_id, attempt)
order by rollout_id
