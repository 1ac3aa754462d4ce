-- At most three rows: of the examples that checkpoint $before and checkpoint $after played, the two
-- whose mean reward rose most and the one whose fell most, or the first with other words if none
-- changed. Training steps that share no example have one row, of two examples of like rank. Each
-- side is told by that of its rollouts whose reward is nearest to the example's mean.
with
dialogues as (
    select
        rollout_id,
        attempt,
        list({'role': role, 'asked': asked, 'said': said} order by started, role, call) as calls
    from calls
    where split = $split and step in ($before, $after)
    group by rollout_id, attempt
),
rewarded as (
    select
        *,
        avg(reward) over (partition by step, example_id) as mean,
        count(*) over (partition by step, example_id) as rollouts
    from (select * exclude (calls) from rollouts)
    join dialogues using (rollout_id, attempt)
    where split = $split and reward is not null
),
played as (
    select
        step,
        example_id,
        any_value(mean) as mean,
        arg_min(
            {
                'rollout_id': rollout_id,
                'reward': reward,
                'rollouts': rollouts,
                'mean': mean,
                'calls': calls
            },
            (abs(reward - mean), rollout_id)
        ) as told
    from rewarded
    group by step, example_id
),
ranked as (
    select
        *,
        row_number() over (partition by step order by mean, example_id) as rank
    from played
),
pairs as (
    select
        before.example_id = after.example_id as same,
        before.told.calls = after.told.calls as alike,
        before,
        after,
        after.mean - before.mean as gain
    from ranked as before
    join ranked as after
        on before.step = $before
        and after.step = $after
        and (before.example_id = after.example_id or before.rank = after.rank)
),
placed as (
    select
        *,
        row_number() over (partition by same order by gain desc, alike, before.example_id) as from_best,
        row_number() over (partition by same order by gain, before.example_id) as from_worst,
        row_number() over (
            partition by same
            order by abs(gain - mean_gain), before.example_id, after.example_id
        ) as from_middle,
        bool_or(same) over () as shared,
        bool_or(gain <> 0) over (partition by same) as changed
    from (select *, avg(gain) over (partition by same) as mean_gain from pairs)
)
select
    same,
    gain,
    before.told as before,
    after.told as after
from placed
where
    case
        when same and changed
            then (gain > 0 and from_best <= 2) or (gain < 0 and from_worst = 1)
        when same then from_best = 1
        else not shared and $split = 'train' and from_middle = 1
    end
order by gain desc, from_best
