-- One row per rollout of a batch, by the attempt that counts: how it ended,
-- what was asked and answered in it, in the order in which it was asked, and whole conversations.
with
spans as (
    select * from parquet_rows($spans)
),
kept as (
    select spans.*
    from spans
    join rollout_attempts('spans') using (rollout_id, attempt)
),
calls as (
    select
        rollout_id,
        role,
        started,
        call,
        messages,
        reply,
        messages ->> '$[#-1].content' as question,
        spoken(reply) as response,
        coalesce(json_array_length(reply -> '$.tool_calls'), 0) as tool_calls,
        list(kept_call) over (partition by rollout_id, role) as continued,
        coalesce(from_json(attributes -> '$.left_out_tools', '["varchar"]'), []) as left_out_tools,
        coalesce(from_json(attributes -> '$.left_out_fields', '["varchar"]'), []) as left_out_fields
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
        ) as interactions,
        -- A call that another one continued is told by that one, which repeats its messages.
        list(
            {'role': role, 'messages': messages::varchar, 'reply': reply::varchar}
            order by role, call
        ) filter (where not list_contains(continued, call)) as conversations,
        list_sort(list_distinct(flatten(list(left_out_tools)))) as left_out_tools,
        list_sort(list_distinct(flatten(list(left_out_fields)))) as left_out_fields
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
        any_value(error_type) filter (where kind = 'reward') as rewarded_error,
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
    coalesce(interactions, []) as interactions,
    coalesce(conversations, []) as conversations,
    coalesce(left_out_tools, []) as left_out_tools,
    coalesce(left_out_fields, []) as left_out_fields
from ends
left join conversations using (rollout_id)
order by rollout_id
