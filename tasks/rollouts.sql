-- One row: in how many groups the rewards of some role, or of its n-th call, are not all equal, and
-- how many calls the rollouts that ended have.
with
spans as (
    select * from parquet_rows($spans)
),
ended as (
    select * exclude (group_id, reward) from rollout_attempts('spans') where has_ended
),
teaching as (
    select distinct group_id
    from (
        select spans.group_id
        from spans
        join ended using (rollout_id, attempt)
        where reward_name = 'reward' or (kind = 'credit' and not starts_with(role, 'measure/'))
        group by spans.group_id, kind, role, call
        having not is_uniform(min(reward), max(reward))
    )
)
select
    (select count(*) from teaching)::integer as teaching_groups,
    (
        select count(*)::integer
        from spans
        join ended using (rollout_id, attempt)
        where kind = 'llm' and len(response_token_ids) > 0
    ) as calls
