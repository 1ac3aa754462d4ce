-- One row per span of a batch, in the order in which things happened in each rollout.
select
    rollout_id as rollout,
    if(starts_with(role, 'measure/'), 'measure', kind) as kind,
    regexp_replace(role, '^measure/', '') as role,
    call,
    gen_ai_usage_input_tokens as prompt,
    kept_tokens as kept,
    gen_ai_usage_output_tokens as answer,
    kept_how,
    round(epoch(ended) - epoch(started), 2)::varchar as seconds,
    case kind
        when 'llm' then spoken(reply)
        when 'error' then error_type || ': ' || error_message
        when 'refused' then error_type || ': ' || error_message
        else concat(reward_name || ' ', reward, ', for ' || error_type)
    end as came_of_it
from parquet_rows($spans) as spans
order by rollout_id, attempt, ended, spans.kind, spans.role
