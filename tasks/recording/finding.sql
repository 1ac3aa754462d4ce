-- Rollouts of the views of runs by what was said in them, by reward, error and tool: training first,
-- and its latest step. An empty text is in everything. `turns` has what was said, call by call.
with calls_of as (
    select
        run,
        rollout_id,
        attempt,
        list({'role': role, 'asked': asked, 'said': said} order by started, call) as turns,
        bool_or(contains(lower(concat_ws(chr(10), asked, said)), lower($text))) as has_text,
        bool_or(list_contains(called, $tool)) as has_tool
    from (
        select
            *,
            messages ->> '$[#-1].content' as asked,
            spoken(reply) as said,
            reply ->> '$.tool_calls[*].function.name' as called
        from spans
        where kind = 'llm' and error_type is null
    )
    group by run, rollout_id, attempt
)
select
    run,
    rollout_id,
    reward,
    nullif(concat_ws(': ', error_type, error_message), '') as error,
    turns
from rollouts
left join calls_of using (run, rollout_id, attempt)
where
    (has_text or contains(lower(coalesce(example::varchar, '')), lower($text)))
    and ($tool = '' or has_tool)
    and contains(lower(concat_ws(': ', error_type, error_message)), lower($error))
    and ($error = '' or error_type is not null)
    and ($least is null or reward >= $least)
    and ($most is null or reward <= $most)
order by split <> 'train', step desc, run, rollout_id
