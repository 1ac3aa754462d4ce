-- One row per split, example, role and service of a dry run: what the calls of the group's rollouts
-- took, as the mean of the checkpoints that played them.
select
    split_of(group_id) as split,
    regexp_extract(group_id, '\d+$') as example,
    role,
    gen_ai_provider_name is distinct from 'other' as ours,
    count(*) / count(distinct step) as calls,
    count(*) / count(distinct rollout_id) as calls_of_rollout,
    sum(gen_ai_usage_input_tokens) / count(distinct step) as prompts,
    sum(gen_ai_usage_output_tokens + coalesce((attributes ->> '$.cut_tokens')::int, 0))
        / count(distinct step) as sampled,
    sum(coalesce((attributes ->> '$.cached_tokens')::int, 0)) / count(distinct step) as cached,
    sum((attributes ->> '$.cost')::double) / count(distinct step) as cost

from spans
where kind = 'llm' and error_type is null and not coalesce(recalled, false)
group by all
order by all
