-- One row per trajectory: the calls of one role whose tokens only grew, in the attempt that earned
-- the rollout's reward. Every call of that attempt is in exactly one trajectory. Greedy rollouts of a
-- group, of the split `baseline`, are not here: their reward is the group's `baseline`.
with recursive

spans as (

    select * from parquet_rows($spans)

),

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
        prompt_token_ids,
        response_token_ids,
        logprobs,
        policy_version,
        kept_how,
        gen_ai_response_finish_reasons[1] = 'length' as cut_short,
        -- An agent that names rewards of roles leaves out those that have none.
        if(
            spans.rollout_id in (select rollout_id from credits), of_role.reward, rewards.reward
        ) as reward,
        of_call.reward as call_reward,
        -- The call it should have grown from: the one the door names, or else the one before it.
        coalesce(
            kept_call,
            lag(spans.call) over (partition by spans.rollout_id, spans.role order by spans.call)
        ) as earlier_call

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
    where kind = 'llm' and error_type is null

),

comparisons as (

    select
        calls.*,
        len(earlier.prompt_token_ids) + len(earlier.response_token_ids) as earlier_length,
        coalesce(
            calls.prompt_token_ids[:len(earlier.prompt_token_ids)] = earlier.prompt_token_ids
            and calls.prompt_token_ids[len(earlier.prompt_token_ids) + 1:earlier_length]
            = earlier.response_token_ids,
            false
        ) as grew

    from calls
    left join calls as earlier
        on calls.rollout_id = earlier.rollout_id
        and calls.role = earlier.role
        and calls.earlier_call = earlier.call

),

turns as (

    select
        * exclude (prompt_token_ids),
        -- Of several calls that grew from the same one, the first goes on with its trajectory.
        grew and 1 = row_number() over (
            partition by rollout_id, role, earlier_call, grew order by call
        ) as continues,
        prompt_token_ids[if(continues, earlier_length, 0) + 1:] as observed,
        case
            when continues then null
            when grew then 'branch'
            when kept_how in ('messages', 'text') then 'mismatch'
            else kept_how
        end as begins

    from comparisons

),

memberships (rollout_id, role, call, first_call) as (

    select rollout_id, role, call, call
    from turns
    where not continues

    union all

    select turns.rollout_id, turns.role, turns.call, memberships.first_call
    from turns
    join memberships
        on turns.rollout_id = memberships.rollout_id
        and turns.role = memberships.role
        and turns.earlier_call = memberships.call
    where turns.continues

),

trajectories as (

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
        list(len(observed) + len(response_token_ids) order by call)::integer[] as call_tokens,
        list(call_reward order by call) filter (where call_reward is not null) as call_rewards,
        list(
            {'observed': observed, 'sampled': response_token_ids, 'logprobs': logprobs} order by call
        ) as turns

    from turns
    join memberships using (rollout_id, role, call)
    group by rollout_id, attempt, role, first_call

)

select
    * exclude (turns),
    (
        select any_value(greedy.reward)
        from trajectories as greedy
        where greedy.role = trajectories.role
            and greedy.group_id = baseline_of(trajectories.group_id)
    ) as baseline,
    flatten([turn.observed || turn.sampled for turn in turns]) as tokens,
    flatten([
        list_resize([]::float[], len(turn.observed), 0) || turn.logprobs for turn in turns
    ]) as logprobs,
    flatten([
        list_resize([]::tinyint[], len(turn.observed), 0)
        || list_resize(
            []::tinyint[], len(turn.sampled), list_contains($trained, role)::tinyint
        )
        for turn in turns
    ]) as mask

from trajectories
where split_of(group_id) <> 'baseline'
order by rollout_id, role, first_call
