-- One row per rollout that a judge was shown, by what has come of it: how often it was shown, how
-- often it was scored, its mean score, null if the judge abstained each time, and, if it was shown
-- once, the parts of a score that is a sum of some, and what it has by each criterion of the judge.
with
spans as (
    select * from parquet_rows($spans)
),
ended as (
    select
        rollout_id as judged_by,
        attempt,
        json_keys(attributes -> '$.example.criteria') as criteria,
        json_extract_string(attributes, '$.example.rollouts[*].id') as shown
    from spans
    join rollout_attempts('spans') using (rollout_id, attempt)
    where reward_name = 'reward'
),
scores as (
    select
        judged_by,
        role as rollout_id,
        any_value(reward) filter (where call is null) as score,
        list(reward order by call) filter (where call is not null) as parts
    from spans
    join ended on spans.rollout_id = judged_by and spans.attempt = ended.attempt
    where kind = 'credit'
    group by judged_by, role
),
measures as (
    select
        judged_by,
        map(list(role[9:] order by role), list(reward order by role)) as criteria
    from spans
    join ended on spans.rollout_id = judged_by and spans.attempt = ended.attempt
    where kind = 'credit' and starts_with(role, 'measure/') and list_contains(criteria, role[9:])
    group by judged_by
),
shown as (
    select
        judged_by,
        unnest(shown) as rollout_id
    from ended
)
select
    rollout_id,
    count(*)::integer as shown,
    count(score)::integer as scored,
    avg(score order by judged_by) as verdict,
    if(count(*) = 1, any_value(parts), null) as parts,
    if(count(*) = 1, any_value(measures.criteria), null) as criteria
from shown
left join scores using (judged_by, rollout_id)
left join measures using (judged_by)
group by rollout_id
order by rollout_id
