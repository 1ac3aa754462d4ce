-- One row per held-out example that both checkpoints played and that fits the search, a page of
-- them, those that changed most first: mean rewards of its rollouts, and the answers of the first.
with
answers as (
    select
        rollout_id,
        attempt,
        left(string_agg(said, chr(10) order by started, role, call), $letters) as said
    from calls
    where list_contains($roles, role)
    group by rollout_id, attempt
),
played as (
    select
        step,
        example_id,
        any_value(left(example::varchar, $letters)) as example,
        min(group_id) as group_id,
        count(*) as rollouts,
        count(error_type) as failed,
        avg(reward) as reward,
        arg_min(coalesce(said, left(error_type || ': ' || error_message, $letters)), rollout_id) as said
    from rollouts
    left join answers using (rollout_id, attempt)
    group by step, example_id
),
pairs as (
    select
        after.example_id,
        after.example,
        before.group_id as group_before,
        after.group_id as group_after,
        before.reward as reward_before,
        after.reward as reward_after,
        before.failed as failed_before,
        after.failed as failed_after,
        before.said as said_before,
        after.said as said_after,
        after.reward - before.reward as gain
    from (select * from played where step = $after) as after
    join (select * from played where step = $before) as before using (example_id)
)
select
    *,
    count(*) over () as found
from pairs
where $change::varchar is null
    or $change = case when gain > 0 then 'better' when gain < 0 then 'worse' when gain = 0 then 'equal' end
order by abs(gain) desc nulls last, example_id
limit $most
offset $skipped
