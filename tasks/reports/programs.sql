-- One row per role and dialect that was answered: its requests, how many were streamed, the longest
-- prompt of a first call and of all calls, and the names of all tools that were offered.
select
    role,
    attributes ->> '$.dialect' as dialect,
    count(*)::bigint as requests,
    count(*) filter (where attributes ->> '$.request.stream' = 'true')::bigint as streamed,
    max(gen_ai_usage_input_tokens) filter (where call = 0) as first_prompt,
    max(gen_ai_usage_input_tokens) as longest_prompt,
    list_sort(
        list_distinct(flatten(list(json_extract_string(tools, '$[*].function.name'))))
    ) as tools
from parquet_rows($spans)
where kind = 'llm'
group by role, dialect
order by min(started)
