-- One row per trajectory: the calls of one role whose tokens only grew, in the attempt that earned
-- the rollout's reward. Every call of that attempt is in exactly one trajectory. The table spans has
-- the spans of a step, and of each answered call (`tasks.recording.turns`) its `place`, how many of
-- its tokens are new, the first call of its trajectory, and whether it grew from an earlier one.
with
rewards as (
    -- A rollout without a reward is not here, and not below.
    select
        rollout_id,
        attempt,
        reward
    from rollout_attempts('spans')
    where has_ended
),
credits as (
    select
        rollout_id,
        attempt,
        role,
        call,
        spans.reward
    from spans
    join rewards using (rollout_id, attempt)
    where kind = 'credit'
),
calls as (
    select
        spans.rollout_id,
        group_id,
        spans.attempt,
        spans.role,
        spans.call,
        first_call,
        place,
        new_tokens,
        policy_version,
        gen_ai_response_finish_reasons[1] = 'length' as cut_short,
        -- An agent that names rewards of roles leaves out those that have none.
        if(
            spans.rollout_id in (select rollout_id from credits), of_role.reward, rewards.reward
        ) as reward,
        of_call.reward as call_reward,
        case
            when first_call <> spans.call then null
            when grew then 'branch'
            when kept_how in ('messages', 'text') then 'mismatch'
            else kept_how
        end as begins
    from spans
    join rewards using (rollout_id, attempt)
    left join credits as of_role
        on spans.rollout_id = of_role.rollout_id
        and spans.role = of_role.role
        and of_role.call is null
    left join credits as of_call
        on spans.rollout_id = of_call.rollout_id
        and spans.role = of_call.role
        and spans.call = of_call.call
    where place is not null
)
select
    rollout_id,
    any_value(group_id) as group_id,
    attempt,
    role,
    first_call,
    count(*)::integer as calls,
    max(begins) as begins,
    arg_min(policy_version, call) as policy_version,
    any_value(reward) as reward,
    coalesce(bool_or(cut_short), false) as truncated,
    list(call order by call) as call_numbers,
    list(new_tokens order by call)::integer[] as call_tokens,
    list(call_reward order by call) filter (where call_reward is not null) as call_rewards,
    list(place order by call) as places
from calls
group by rollout_id, attempt, role, first_call
order by rollout_id, role, first_call
