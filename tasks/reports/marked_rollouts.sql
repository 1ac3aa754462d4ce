-- One row per rewarded rollout of the given batches: its reward, its example, and what was asked
-- and answered in it by roles that no policy of the run answers.
with
others as (
    select
        rollout_id,
        attempt,
        list({'role': role, 'asked': asked, 'said': said} order by started, role, call) as calls
    from calls
    where list_contains($batches, batch) and not list_contains($shown, role)
    group by rollout_id, attempt
)
select
    rollout_id,
    reward,
    example::varchar as example,
    coalesce(others.calls, []) as others
from rollouts
left join others using (rollout_id, attempt)
where list_contains($batches, batch) and reward is not null
order by reward desc, rollout_id
