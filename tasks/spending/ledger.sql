-- One row per purpose, role, step and use of a run's calls: the tokens that they took, by kind. A
-- call that was never answered has the tokens of the call that repeated it, or else as many as it
-- could have sampled. What an ancestor of the run has asked is not here, and what was given again
-- from the record was paid for where it was sampled.
with everything as (
    select *, false as aside from spans
    union all by name
    select *, true as aside
    from aside
    anti join spans using (rollout_id, attempt, kind, role, call, started)
),

calls as (
    select
        *,
        coalesce((attributes ->> '$.cached_tokens')::int, 0) as cached,
        coalesce((attributes ->> '$.cut_tokens')::int, 0) + gen_ai_usage_output_tokens as sampled

    from everything
    where kind = 'llm' and error_type is null
),

ends as (
    select
        rollout_id,
        attempt,
        aside,
        bool_or(kind = 'error') as failed,
        bool_or(kind = 'reward') as rewarded

    from everything
    group by all
),

given_again as (
    select distinct rollout_id, role, request_sha, policy_version
    from calls
    where recalled
),

asked as (
    select
        calls.*,
        case
            when aside then 'set aside'
            when rewarded then 'used'
            when given_again.request_sha is not null then 'used'
            when failed then 'failed'
            else 'interrupted'
        end as use

    from calls
    join ends using (rollout_id, attempt, aside)
    left join given_again using (rollout_id, role, request_sha, policy_version)
    where not coalesce(recalled, false)
),

lost as (
    select
        begun.*,
        0 as cached,
        coalesce(
            (
                select max(sampled)
                from calls
                where
                    calls.rollout_id = begun.rollout_id
                    and calls.role = begun.role
                    and calls.request_sha = begun.request_sha
                    and calls.policy_version = begun.policy_version
                    and calls.gen_ai_request_seed = begun.gen_ai_request_seed
            ),
            gen_ai_request_max_tokens
        ) as sampled,
        'not answered' as use

    from everything as begun
    where kind = 'begun'
)

select
    split_of(group_id) as split,
    step,
    role,
    use,
    gen_ai_provider_name is distinct from 'other' as ours,
    count(*) as calls,
    coalesce(sum(gen_ai_usage_input_tokens - cached), 0)::bigint as prefill,
    coalesce(sum(cached), 0)::bigint as cached,
    coalesce(sum(sampled), 0)::bigint as sampled,
    sum((attributes ->> '$.cost')::double) as cost

from (
    select * from asked
    union all by name
    select * from lost
)
where not list_contains($ancestors::varchar[], coalesce(run_id, run))
group by all
order by split, role, step, use
