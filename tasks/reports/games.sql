-- One row per rollout of a batch that was not left out, by the attempt that counts: how it ended,
-- and what was asked and answered in it, in the order in which it was asked.
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

kept as (

    select spans.*
    from spans
    join attempts using (rollout_id, attempt)

),

calls as (

    select
        rollout_id,
        role,
        started,
        call,
        messages ->> '$[#-1].content' as question,
        spoken(reply) as response,
        coalesce(json_array_length(reply -> '$.tool_calls'), 0) as tool_calls

    from kept
    where kind = 'llm' and error_type is null

),

conversations as (

    select
        rollout_id,
        -- An answer that calls a tool is a step of a turn; one that does not ends it.
        count(*) filter (where role = $policy and tool_calls = 0) as turn_index,
        sum(tool_calls) filter (where role = $policy) as num_tool_calls,
        list(
            {'role': role, 'question': question, 'response': response} order by started, role, call
        ) as interactions

    from calls
    group by rollout_id

),

ends as (

    select
        rollout_id,
        any_value(attributes ->> '$.example_id')::bigint as example_id,
        any_value(attributes ->> '$.example') as example,
        any_value(reward) filter (where reward_name = 'reward') as reward,
        any_value(error_type || ': ' || error_message) filter (where kind = 'error') as error,
        list({'role': role, 'why': error_type || ': ' || error_message} order by ended)
            filter (where kind = 'refused') as refused

    from kept
    where kind in ('reward', 'error', 'refused')
    group by rollout_id
    having bool_or(kind <> 'refused')

)

select
    ends.* replace (coalesce(refused, []) as refused),
    coalesce(turn_index, 0) as turn_index,
    coalesce(num_tool_calls, 0)::bigint as num_tool_calls,
    coalesce(interactions, []) as interactions

from ends
left join conversations using (rollout_id)
order by rollout_id
