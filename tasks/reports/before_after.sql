-- At most one row: an example as checkpoint $before and as checkpoint $after played it, by the first
-- of its rollouts. Of the examples that both played, it is one that changed about as all did on
-- average; training steps that share no example are told by two of like rank.
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

played as (

    select
        step,
        example_id,
        min(rollout_id) as rollout_id,
        arg_min(reward, rollout_id) as reward,
        arg_min(calls, rollout_id) as calls

    from (select * exclude (calls) from rollouts)
    join dialogues using (rollout_id, attempt)
    where split = $split and reward is not null
    group by step, example_id

),

ranked as (

    select
        *,
        row_number() over (partition by step order by reward, example_id) as rank

    from played

),

pairs as (

    select
        before.example_id = after.example_id as same,
        before,
        after,
        after.reward - before.reward as gain

    from ranked as before
    join ranked as after
        on before.step = $before
        and after.step = $after
        and (before.example_id = after.example_id or before.rank = after.rank)

)

select
    same,
    before.rollout_id as rollout_before,
    before.reward as reward_before,
    before.calls as calls_before,
    after.rollout_id as rollout_after,
    after.reward as reward_after,
    after.calls as calls_after

from pairs
where same or $split = 'train'
order by same desc, abs(gain - avg(gain) over (partition by same)), before.example_id, after.example_id
limit 1
